"""Run one pass of a pipeline on a small real model, with the graphs before and after it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from tests.models import TOLERANCE, Pair, preset_pair, relative_error
from tests.stages import eager_once, logits_after, stages_of
from tpcompile.ir.checker import check_graph
from tpcompile.passes import Pass, Report, Stage, default_pipeline, for_ranks, parse_pipeline
from tpcompile.rewriting.manager import clone

LENGTHS = ((1,), (3, 1, 4))
"""One token, and three sequences that attention must separate."""

TINY_VOCABULARY = 1013

STANDARD = [
    "capture",
    "canonicalize",
    "split-heads",
    "raise-norm",
    "raise-gates",
    "raise-rope",
    "raise-swiglu",
    "raise-experts",
    "raise-attention",
    "plan-sharding",
    "shard-linears",
    "kv-heads",
    "vocab-parallel",
    "insert-collectives",
    "fuse-qkv",
    "fuse-delta",
    "fuse-gate-up",
    "fuse-add-norm",
    "select-rows",
    "greedy-head",
    "cache-kv",
    "keep-states",
]
"""The stages of the standard pipeline, in order."""

SEQUENCE_PARALLEL = (
    "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention,plan-sharding,shard-linears,"
    "kv-heads,vocab-parallel,insert-collectives,sequence-parallel,fuse-qkv,fuse-gate-up,"
    "fuse-add-norm,greedy-head,cache-kv"
)


@dataclass(frozen=True)
class Step:
    """The last of these passes, with the stages before and after it."""

    pair: Pair
    passes: tuple[Pass, ...]
    before: Stage
    after: Stage

    @property
    def current(self) -> Pass:
        return self.passes[-1]

    @property
    def matches(self) -> int:
        return self.after.stats.matches

    def diff(self, hidden: str = "layer 1") -> str:
        """Return what the pass changed in all layers but the hidden one, without origins."""
        before, after = (_shown(stage.text(), hidden) for stage in (self.before, self.after))
        lines = difflib.unified_diff(before, after, lineterm="", n=1)
        changed = list(lines)[2:]
        return "\n".join("…" if line.startswith("@@") else line for line in changed) + "\n"

    @cached_property
    def logits(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the logits before and after the pass, for each batch."""
        return [
            (self._logits(self.passes[:-1], lengths), self._logits(self.passes, lengths))
            for lengths in LENGTHS
        ]

    def _logits(self, passes: tuple[Pass, ...], lengths: tuple[int, ...]) -> torch.Tensor:
        return logits_after(self.pair, passes, lengths, TINY_VOCABULARY)

    def assert_same_bits(self) -> None:
        for before, after in self.logits:
            assert torch.equal(before, after)

    def assert_near(self) -> None:
        """Assert that the logits match the previous stage and Hugging Face."""
        for lengths, (before, after) in zip(LENGTHS, self.logits, strict=True):
            assert relative_error(after, before) < TOLERANCE
            expected = eager_once(self.pair, lengths)
            assert relative_error(after, expected) < TOLERANCE

    def again(self) -> Report:
        """Run the pass on its own result; assert that it changes nothing."""
        gm = clone(self.after.graph)
        report = self.current.apply(gm)
        assert check_graph(gm) == []
        assert Stage("again", "", self.after.stats, lambda: gm).text() == self.after.text()
        return report


def _shown(text: str, hidden: str) -> list[str]:
    lines = [line.partition("  # ")[0] for line in _without(text.splitlines(), hidden)]
    return [line for line in lines if not line.startswith("rotary ")]


def _without(lines: Sequence[str], hidden: str) -> Iterator[str]:
    shown = True
    for line in lines:
        if not line.startswith("  "):
            shown = line != hidden
        if shown:
            yield line


@lru_cache
def step(name: str, model: str = "tiny-qwen3", tp: int = 4, pipeline: str = "") -> Step:
    """Return the pass `name` of the standard pipeline, or of another one."""
    pair = preset_pair(model)
    passes = for_ranks(parse_pipeline(pipeline), tp) if pipeline else default_pipeline(tp)
    return step_of(name, pair, passes)


def step_of(name: str, pair: Pair, passes: Sequence[Pass]) -> Step:
    """Return the pass `name` of a list of passes."""
    place = [current.name for current in passes].index(name)
    prefix = tuple(passes[: place + 1])
    return Step(pair, prefix, *stages_of(pair, prefix)[-2:])
