"""The passes in order, and pipelines as text: `canonicalize,plan-sharding{tp=2},shard-linears`.

A whole pipeline has a name too, with options of its own: `decode{spans=4}`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from tpcompile.passes.interleave_rotary import InterleaveRotary
from tpcompile.passes.kv_heads import KvHeads
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.passes.raise_attention import RaiseAttention
from tpcompile.passes.raise_norm import RaiseNorm
from tpcompile.passes.raise_rope import RaiseRope
from tpcompile.passes.raise_swiglu import RaiseSwiglu
from tpcompile.passes.sequence_parallel import SequenceParallel
from tpcompile.passes.shard_linears import ShardLinears
from tpcompile.passes.split_attention import SplitAttention
from tpcompile.passes.vocab_parallel import VocabParallel
from tpcompile.rewriting.manager import Pass, describe

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
_STEP: tuple[type[Pass], ...] = (
    FuseNormQkv,
    SplitAttention,  # behind fuse-norm-qkv: spans are read from the cache, where all keys are then
    FuseNormGateUp,
    FuseNormLinear,  # behind the fusions of norms that want a certain linear
    FuseResidual,
)
_DECODE: tuple[type[Pass], ...] = (
    *(kind for kind in _STANDARD if kind is not FuseAddNorm),  # norms are left to what reads them
    *_STEP,
)
_OPTIONAL: tuple[type[Pass], ...] = (SequenceParallel, InterleaveRotary, *_STEP)

ALL_PASSES: dict[str, type[Pass]] = {kind.name: kind for kind in (*_STANDARD, *_OPTIONAL)}


@dataclass(frozen=True)
class Standard:
    """From the captured graph to one that runs any mix of prompts and new tokens."""

    name: ClassVar[str] = "standard"
    block: int = CacheKv.block
    """How many tokens a block of the KV cache holds."""
    interleaved: bool = False
    """Rotate neighbouring numbers of a head, not those half a head apart."""

    def passes(self) -> list[Pass]:
        return list(_made(_STANDARD, self.interleaved, CacheKv(self.block)))


@dataclass(frozen=True)
class Decode:
    """From the captured graph to the instruction groups of a step: one new token a sequence."""

    name: ClassVar[str] = "decode"
    spans: int = SplitAttention.spans
    """Into how many spans attention splits a sequence."""
    block: int = CacheKv.block
    """How many tokens a block of the KV cache holds."""
    interleaved: bool = False
    """Rotate neighbouring numbers of a head, not those half a head apart."""

    def passes(self) -> list[Pass]:
        options = CacheKv(self.block), SplitAttention(self.spans)
        return list(_made(_DECODE, self.interleaved, *options))


ALL_PIPELINES: dict[str, type[Standard | Decode]] = {kind.name: kind for kind in (Standard, Decode)}


def _made(kinds: Sequence[type[Pass]], interleaved: bool, *given: Pass) -> Iterator[Pass]:
    """A pass of each kind: the one that is given, or one with its default options."""
    options = {type(current): current for current in given}
    for kind in kinds:
        yield options.get(kind) or kind()
        if interleaved and kind is RaiseAttention:  # while heads have projections of their own
            yield InterleaveRotary()


def default_pipeline(tp: int = 1, interleaved: bool = False) -> list[Pass]:
    """The standard pipeline; it does the right thing for every tp, 1 included."""
    return for_ranks(Standard(interleaved=interleaved).passes(), tp)


def decode_pipeline(
    tp: int = 1, spans: int = 1, block: int = CacheKv.block, interleaved: bool = False
) -> list[Pass]:
    """To a graph of the instruction groups of a decode step: one new token a sequence.

    `spans` is into how many parts attention splits a sequence, `block` the tokens of a KV block;
    `interleaved` heads are rotated in neighbouring pairs.
    """
    return for_ranks(Decode(spans, block, interleaved).passes(), tp)


def decoding(passes: Sequence[Pass], spans: int = 1) -> list[Pass]:
    """To decode steps of the model that `passes` make: their weights, layouts and KV cache."""
    kept = [p for p in passes if type(p) not in (FuseAddNorm, SequenceParallel, *_STEP)]
    return [*kept, *_made(_STEP, False, SplitAttention(spans))]


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
    """The passes that a text names, with their options; the name of a pipeline is all of its."""
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
        passes += _make(name.group(1), options.group(1) if options else "")
        if place == len(text):
            return passes
        place += 1


def _unreadable(text: str, place: int, problem: str) -> UsageError:
    return UsageError(
        f"The pipeline cannot be read: {problem} at character {place + 1}",
        got=repr(text),
        expected=_FORM,
    )


def _make(name: str, options: str) -> list[Pass]:
    if name in ALL_PIPELINES:
        pipeline = ALL_PIPELINES[name]
        return pipeline(**_values(f"pipeline {name}", pipeline, options)).passes()
    kind = ALL_PASSES.get(name)
    if kind is None:
        known = did_you_mean(name, [*ALL_PASSES, *ALL_PIPELINES])
        raise UsageError(f"There is no pass {name!r}", hint=known)
    return [kind(**_values(f"pass {name}", kind, options))]


def _values(whose: str, kind: type[Any], options: str) -> dict[str, Any]:
    """The options of a pass or a pipeline, read as what they are by default."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for option in filter(None, (o.strip() for o in options.split(","))):
        key, _, value = (part.strip() for part in option.partition("="))
        if key not in fields:
            known = did_you_mean(key, fields) if fields else "It has no options"
            raise UsageError(f"The {whose} has no option {key!r}", hint=known)
        if key in values:
            raise UsageError(f"The {whose} has the option {key} twice", got=options)
        expected: Any = type(fields[key].default)
        meant = "true or false" if expected is bool else expected.__name__.upper()
        try:
            values[key] = _yes_or_no(value) if expected is bool else expected(value)
        except ValueError as error:
            raise UsageError(
                f"The option {key} of the {whose} cannot be {value!r}",
                expected=f"{key}={meant}",
            ) from error
    return values


def _yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"
