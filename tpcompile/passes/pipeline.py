"""The passes in order, and pipelines as text: `canonicalize,plan-sharding{tp=2},shard-linears`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from tpcompile.errors import UsageError, did_you_mean
from tpcompile.passes.cache_kv import CacheKv
from tpcompile.passes.canonicalize import Canonicalize
from tpcompile.passes.fuse_add_norm import FuseAddNorm
from tpcompile.passes.fuse_gate_up import FuseGateUp
from tpcompile.passes.fuse_norm_gate_up import FuseNormGateUp
from tpcompile.passes.fuse_norm_linear import FuseNormLinear
from tpcompile.passes.fuse_norm_qkv import FuseNormQkv
from tpcompile.passes.fuse_qkv import FuseQkv
from tpcompile.passes.fuse_residual import FuseResidual
from tpcompile.passes.greedy_head import GreedyHead
from tpcompile.passes.insert_collectives import InsertCollectives
from tpcompile.passes.kv_heads import KvHeads
from tpcompile.passes.manager import Pass, describe
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.passes.raise_attention import RaiseAttention
from tpcompile.passes.raise_norm import RaiseNorm
from tpcompile.passes.raise_rope import RaiseRope
from tpcompile.passes.raise_swiglu import RaiseSwiglu
from tpcompile.passes.sequence_parallel import SequenceParallel
from tpcompile.passes.shard_linears import ShardLinears
from tpcompile.passes.split_attention import SplitAttention
from tpcompile.passes.vocab_parallel import VocabParallel

_STANDARD: tuple[type[Pass], ...] = (
    Canonicalize,
    RaiseNorm,
    RaiseRope,
    RaiseSwiglu,
    RaiseAttention,  # behind raise-rope, whose transposes it cancels
    PlanSharding,  # reads what was raised
    ShardLinears,
    KvHeads,  # behind shard-linears: KV heads follow the query heads of a rank
    VocabParallel,
    InsertCollectives,  # behind everything that wishes for a whole value
    FuseQkv,  # behind sharding: fused parts are split first, then joined on each rank
    FuseGateUp,
    FuseAddNorm,  # behind the collectives: the sums must be taken by then
    GreedyHead,  # behind insert-collectives: it reads the logits before they are gathered
    CacheKv,  # last: what looks for attention has found it
)
_DECODE: tuple[type[Pass], ...] = (
    Canonicalize,
    RaiseNorm,
    RaiseRope,
    RaiseSwiglu,
    RaiseAttention,
    PlanSharding,
    ShardLinears,
    KvHeads,
    VocabParallel,
    InsertCollectives,
    FuseQkv,
    FuseGateUp,
    GreedyHead,
    CacheKv,  # as far as here the standard pipeline, but norms are left to what reads them
    FuseNormQkv,
    SplitAttention,  # behind fuse-norm-qkv: spans are read from the cache, where all keys are then
    FuseNormGateUp,
    FuseNormLinear,  # behind the fusions of norms that want a certain linear
    FuseResidual,
)
_OPTIONAL: tuple[type[Pass], ...] = (
    SequenceParallel,
    FuseNormQkv,
    SplitAttention,
    FuseNormGateUp,
    FuseNormLinear,
    FuseResidual,
)

ALL_PASSES: dict[str, type[Pass]] = {kind.name: kind for kind in (*_STANDARD, *_OPTIONAL)}


def default_pipeline(tp: int = 1) -> list[Pass]:
    """The standard pipeline; it does the right thing for every tp, 1 included."""
    return for_ranks([kind() for kind in _STANDARD], tp)


def decode_pipeline(tp: int = 1, spans: int = 1, block: int = CacheKv.block) -> list[Pass]:
    """To a graph of the instruction groups of a decode step: one new token a sequence.

    `spans` is into how many parts attention splits a sequence, `block` the tokens of a KV block.
    """
    options: dict[type[Pass], Pass] = {
        CacheKv: CacheKv(block),
        SplitAttention: SplitAttention(spans),
    }
    return for_ranks([options.get(kind) or kind() for kind in _DECODE], tp)


def for_ranks(passes: Sequence[Pass], tp: int) -> list[Pass]:
    """The same passes, planning for `tp` ranks where they do not say for how many."""
    return [
        dataclasses.replace(current, tp=tp)
        if isinstance(current, PlanSharding) and not current.tp
        else current
        for current in passes
    ]


def pipeline_text(passes: Sequence[Pass]) -> str:
    return ",".join(map(describe, passes))


_NAME = re.compile(r"\s*([A-Za-z0-9_-]+)\s*")
_OPTIONS = re.compile(r"\{([^{}]*)\}\s*")
_FORM = "pass,pass{option=value,option=value},…"


def parse_pipeline(text: str) -> list[Pass]:
    """The passes that a pipeline text names, with their options."""
    passes: list[Pass] = []
    place = 0
    while True:
        name = _NAME.match(text, place)
        if not name:
            raise _unreadable(text, place, "a pass is missing")
        place = name.end()
        options = _OPTIONS.match(text, place)
        place = options.end() if options else place
        if text[place : place + 1] not in ("", ","):
            unclosed = text[place] == "{" and "}" not in text[place:]
            missing = "a closing brace" if unclosed else "a comma or the end"
            raise _unreadable(text, place, f"{missing} is missing")
        passes.append(_make(name.group(1), options.group(1) if options else ""))
        if place == len(text):
            return passes
        place += 1


def _unreadable(text: str, place: int, problem: str) -> UsageError:
    return UsageError(
        f"The pipeline cannot be read: {problem} at character {place + 1}",
        got=repr(text),
        expected=_FORM,
    )


def _make(name: str, options: str) -> Pass:
    kind = ALL_PASSES.get(name)
    if kind is None:
        raise UsageError(f"There is no pass {name!r}", hint=did_you_mean(name, ALL_PASSES))
    values: dict[str, Any] = {}
    for option in filter(None, (o.strip() for o in options.split(","))):
        key, _, value = (part.strip() for part in option.partition("="))
        fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
        if key not in fields:
            known = did_you_mean(key, fields) if fields else "It has no options"
            raise UsageError(f"The pass {name} has no option {key!r}", hint=known)
        if key in values:
            raise UsageError(f"The pass {name} has the option {key} twice", got=options)
        default: Any = fields[key].default
        try:
            values[key] = type(default)(value)
        except ValueError as error:
            raise UsageError(
                f"The option {key} of the pass {name} cannot be {value!r}",
                expected=f"{key}={type(default).__name__.upper()}",
            ) from error
    return kind(**values)
