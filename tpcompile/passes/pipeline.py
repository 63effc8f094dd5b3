"""The passes in order, and pipelines as text: `canonicalize,plan-sharding{tp=2},shard-linears`.

A whole pipeline also has a name and options: `decode{spans=4}`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Protocol, TypeVar

from torch import fx

from tpcompile.errors import UsageError, did_you_mean
from tpcompile.passes.cache_kv import CacheKv
from tpcompile.passes.canonicalize import Canonicalize
from tpcompile.passes.fuse_add_norm import FuseAddNorm
from tpcompile.passes.fuse_delta import FuseDelta
from tpcompile.passes.fuse_delta_step import FuseDeltaStep
from tpcompile.passes.fuse_experts import FuseExperts
from tpcompile.passes.fuse_gate_up import FuseGateUp
from tpcompile.passes.fuse_gated_attention import FuseGatedAttention
from tpcompile.passes.fuse_norm_gate_up import FuseNormGateUp
from tpcompile.passes.fuse_norm_linear import FuseNormLinear
from tpcompile.passes.fuse_norm_qkv import FuseNormQkv
from tpcompile.passes.fuse_qkv import FuseQkv
from tpcompile.passes.fuse_residual import FuseResidual
from tpcompile.passes.greedy_head import GreedyHead
from tpcompile.passes.insert_collectives import InsertCollectives
from tpcompile.passes.interleave_rotary import InterleaveRotary
from tpcompile.passes.keep_states import KeepStates
from tpcompile.passes.kv_heads import KvHeads
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.passes.raise_attention import RaiseAttention
from tpcompile.passes.raise_experts import RaiseExperts
from tpcompile.passes.raise_gates import RaiseGates
from tpcompile.passes.raise_norm import RaiseNorm
from tpcompile.passes.raise_rope import RaiseRope
from tpcompile.passes.raise_swiglu import RaiseSwiglu
from tpcompile.passes.select_rows import SelectRows
from tpcompile.passes.sequence_parallel import SequenceParallel
from tpcompile.passes.shard_linears import ShardLinears
from tpcompile.passes.split_attention import SplitAttention
from tpcompile.passes.split_heads import SplitHeads
from tpcompile.passes.vocab_parallel import VocabParallel
from tpcompile.registry import Registry
from tpcompile.rewriting.manager import (
    PASSES,
    Instrument,
    Pass,
    Stats,
    check_options,
    clone,
    describe,
    graph_pass,
    run_passes,
)
from tpcompile.rewriting.proving import Prover
from tpcompile.rewriting.reproducer import OnFailure

_STANDARD: tuple[type[Pass], ...] = (
    Canonicalize,
    SplitHeads,
    RaiseNorm,
    RaiseGates,  # after raise-norm; before raise-swiglu, since a gated norm contains a SwiGLU
    RaiseRope,
    RaiseSwiglu,
    RaiseExperts,
    RaiseAttention,  # after raise-rope, whose transposes it cancels
    PlanSharding,  # after the raising passes: it looks for the ops that they make
    ShardLinears,
    KvHeads,  # after shard-linears: the query heads of a rank determine its KV heads
    VocabParallel,
    InsertCollectives,  # after all passes that insert redistribute
    FuseQkv,  # after sharding: weights are split first, then joined on each rank
    FuseDelta,
    FuseGateUp,
    FuseAddNorm,  # after insert-collectives: it needs the reduced sums
    SelectRows,  # after fuse-add-norm, which takes no sum of which rows are selected first
    GreedyHead,  # after insert-collectives: it reads the logits before they are gathered
    CacheKv,  # almost last: it replaces the attention that other passes look for
    KeepStates,  # after cache-kv, whose lengths it reads
)
_STEP: tuple[type[Pass], ...] = (
    FuseNormQkv,
    FuseDeltaStep,
    SplitAttention,  # after fuse-norm-qkv: spans are read from the cache, which then has all keys
    FuseGatedAttention,  # after split-attention, whose merge it fuses
    FuseExperts,
    FuseNormGateUp,
    FuseNormLinear,  # after the fusions of norms with specific linears
    FuseResidual,
)
_DECODE: tuple[type[Pass], ...] = (
    # Each norm is fused into its reader, and a step returns the logits of every row.
    *(kind for kind in _STANDARD if kind not in (FuseAddNorm, SelectRows)),
    *_STEP,
)
_OPTIONAL: tuple[type[Pass], ...] = (SequenceParallel, InterleaveRotary, *_STEP)

for _kind in (*_STANDARD, *_OPTIONAL):
    graph_pass(_kind)


class Pipeline(Protocol):
    """Protocol of a pipeline: a frozen dataclass whose fields are its options."""

    name: ClassVar[str]

    def passes(self) -> list[Pass]: ...


PIPELINES: Registry[type[Pipeline]] = Registry("pipeline")
_Kind = TypeVar("_Kind", bound=type[Pipeline])


def pipeline(kind: _Kind) -> _Kind:
    """Class decorator: register a pipeline under its name."""
    check_options("pipeline", kind, "passes")
    PIPELINES.add(kind.name, kind)
    return kind


@pipeline
@dataclass(frozen=True)
class Standard:
    """Lower the captured graph to one that runs any mix of prompts and new tokens."""

    name: ClassVar[str] = "standard"
    block: int = CacheKv.block
    """Number of tokens per block of the KV cache."""
    interleaved: bool = False
    """Rotate adjacent elements of a head, instead of elements half a head apart."""
    kv: str = CacheKv.kv
    """The storage of keys and values: the dtype of the `model`, or `int8`."""

    def passes(self) -> list[Pass]:
        return list(_passes(_STANDARD, self.interleaved, CacheKv(self.block, self.kv)))


@pipeline
@dataclass(frozen=True)
class Decode:
    """Lower the captured graph to instruction groups for steps with one new token per sequence."""

    name: ClassVar[str] = "decode"
    spans: int = SplitAttention.spans
    """Number of spans into which attention splits a sequence."""
    block: int = CacheKv.block
    """Number of tokens per block of the KV cache."""
    interleaved: bool = False
    """Rotate adjacent elements of a head, instead of elements half a head apart."""
    kv: str = CacheKv.kv
    """The storage of keys and values: the dtype of the `model`, or `int8`."""

    def passes(self) -> list[Pass]:
        options = CacheKv(self.block, self.kv), SplitAttention(self.spans)
        return list(_passes(_DECODE, self.interleaved, *options))


def _passes(kinds: Sequence[type[Pass]], interleaved: bool, *given: Pass) -> Iterator[Pass]:
    """Yield a pass of each kind: the given one, or one with default options."""
    options = {type(current): current for current in given}
    for kind in kinds:
        yield options.get(kind) or kind()
        if interleaved and kind is RaiseAttention:  # before fuse-qkv joins the projections
            yield InterleaveRotary()


def default_pipeline(tp: int = 1, interleaved: bool = False) -> list[Pass]:
    """Return the standard pipeline; it handles every tp, including 1."""
    return for_ranks(Standard(interleaved=interleaved).passes(), tp)


def decode_pipeline(
    tp: int = 1,
    spans: int = 1,
    block: int = CacheKv.block,
    interleaved: bool = False,
    kv: str = CacheKv.kv,
) -> list[Pass]:
    """Return the pipeline for decode steps, which process one new token per sequence.

    The result is a graph of instruction groups. `spans` is the number of parts into which attention
    splits a sequence, `block` the number of tokens per KV block. With `interleaved`, adjacent
    elements of a head are rotated together. `kv` is an option of `cache-kv`.
    """
    return for_ranks(Decode(spans, block, interleaved, kv).passes(), tp)


def decoding(passes: Sequence[Pass], spans: int = 1) -> list[Pass]:
    """Return the decode pipeline that gives the same weights, layouts and KV cache as `passes`."""
    base = [p for p in passes if type(p) not in (FuseAddNorm, SelectRows, SequenceParallel, *_STEP)]
    return [*base, *_passes(_STEP, False, SplitAttention(spans))]


class DecodeFork:
    """An instrument of a prompt pipeline that stores the graph where the decode pipeline forks."""

    def __init__(self, passes: Sequence[Pass], on_failure: OnFailure | None = None) -> None:
        self._on_failure = on_failure
        self.passes = passes
        """The passes of the prompt pipeline."""
        pairs = zip(passes, decoding(passes), strict=False)
        self.shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        """The number of passes before the fork."""
        self.prover = Prover()
        """A prover for the prompt pipeline, whose expressions the proofs of decode passes use."""
        self._left = self.shared
        self._graph: fx.GraphModule | None = None

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        """Keep a copy of the graph after the last shared pass."""
        if self._left == 0:
            self._graph = clone(gm)
        self._left -= 1

    def run(
        self, spans: int, instruments: Sequence[Instrument] = (), prover: Prover | None = None
    ) -> fx.GraphModule:
        """Run the remaining decode passes; return the graph of instruction groups."""
        assert self._graph is not None, "the prompt pipeline has not run"
        passes = decoding(self.passes, spans)
        later, done = passes[self.shared :], passes[: self.shared]
        prover = prover or Prover(self.prover.expressions)
        return run_passes(self._graph, later, instruments, done, self._on_failure, prover=prover)[0]


def for_ranks(passes: Sequence[Pass], tp: int) -> list[Pass]:
    """Return the same passes, with `tp` filled in where plan-sharding does not set it."""
    return [
        dataclasses.replace(current, tp=tp)
        if isinstance(current, PlanSharding) and not current.tp
        else current
        for current in passes
    ]


def with_kv(passes: Sequence[Pass], kv: str | None) -> list[Pass]:
    """Return the same passes, with `kv` as the option of `cache-kv`; None changes nothing."""
    if kv is None:
        return list(passes)
    if not any(isinstance(current, CacheKv) for current in passes):
        raise UsageError(
            f"The pipeline has no KV cache, which kv={kv!r} requires", hint="Add cache-kv to it"
        )
    return _replaced(passes, CacheKv, kv=kv)


def with_experts(passes: Sequence[Pass], experts: str) -> list[Pass]:
    """Return the same passes, with `experts` as the option of `plan-sharding` unless it is auto."""
    if experts == PlanSharding.experts:
        return list(passes)
    if not any(isinstance(current, PlanSharding) for current in passes):
        raise UsageError(
            f"The pipeline plans no sharding, which experts={experts!r} requires",
            hint="Add plan-sharding to it",
        )
    return _replaced(passes, PlanSharding, experts=experts)


def _replaced(passes: Sequence[Pass], kind: type[Any], **options: object) -> list[Pass]:
    """Return the same passes, with these options set on those of a kind."""
    return [
        dataclasses.replace(current, **options) if isinstance(current, kind) else current
        for current in passes
    ]


def check_names(passes: Sequence[Pass]) -> None:
    """Raise if the declared order of a pass names a pass that does not exist."""
    known = {*PASSES, *(current.name for current in passes)}
    for current in passes:
        for word in ("after", "before"):
            for name in getattr(current, word, ()):
                if name not in known:
                    raise UsageError(
                        f"The pass {current.name} must run {word} {name!r}, which is not a pass",
                        hint=did_you_mean(name, known),
                    )


def pipeline_text(passes: Sequence[Pass]) -> str:
    return ",".join(map(describe, passes))


_NAME = re.compile(r"\s*([A-Za-z0-9_-]+)\s*")
_OPTIONS = re.compile(r"\{([^{}]*)\}\s*")
_FORM = "pass,pass{option=value,option=value},…"


def parse_pipeline(text: str) -> list[Pass]:
    """Parse pipeline text into passes; the name of a pipeline stands for all its passes."""
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
        f"Invalid pipeline: {problem} at character {place + 1}",
        got=repr(text),
        expected=_FORM,
    )


def _make(name: str, options: str) -> list[Pass]:
    if name in PIPELINES and name in PASSES:
        raise UsageError(
            f"The name {name} is ambiguous: a pass and a pipeline have it",
            hint="Rename one of them where it is registered",
        )
    if name in PIPELINES:
        whole = PIPELINES[name]
        return whole(**_values(f"pipeline {name}", whole, options)).passes()
    if name not in PASSES:
        known = did_you_mean(name, [*PASSES, *PIPELINES])
        raise UsageError(f"Unknown pass {name!r}", hint=known)
    kind: Any = PASSES[name]
    return [kind(**_values(f"pass {name}", kind, options))]


def _values(owner: str, kind: type[Any], options: str) -> dict[str, Any]:
    """Parse the options of a pass or a pipeline, each as the type of its default."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for option in filter(None, (o.strip() for o in options.split(","))):
        key, _, value = (part.strip() for part in option.partition("="))
        if key not in fields:
            known = did_you_mean(key, fields) if fields else "It has no options"
            raise UsageError(f"The {owner} has no option {key!r}", hint=known)
        if key in values:
            raise UsageError(f"The {owner} sets the option {key} twice", got=options)
        expected: Any = type(fields[key].default)
        meant = "true or false" if expected is bool else expected.__name__.upper()
        try:
            values[key] = _yes_or_no(value) if expected is bool else expected(value)
        except ValueError as error:
            raise UsageError(
                f"Invalid value {value!r} for the option {key} of the {owner}",
                expected=f"{key}={meant}",
            ) from error
    return values


def _yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"
