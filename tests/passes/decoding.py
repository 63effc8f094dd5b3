"""Run a pass of the decode pipeline on a small real model, with one new token per sequence.

Prefill by the stage `keep-states` fills the cache, in scattered blocks, and the states of linear
attention if the model has any. Unused slots are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import fx

from tests.models import TOLERANCE, Pair, padded, preset_pair, relative_error
from tests.passes.steps import TINY_VOCABULARY, Step, step_of
from tests.stages import graph_after, stages_of
from tpcompile.ir.meta import value_type
from tpcompile.ir.simulate import (
    Values,
    empty_cache,
    empty_states,
    logits_of,
    materialise,
    run_ranks,
)
from tpcompile.passes import Pass, Stage
from tpcompile.passes.cache_kv import CACHE
from tpcompile.passes.keep_states import STATES, TAILS
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.rewriting.manager import clone

DECODE = [
    "fuse-norm-qkv",
    "fuse-delta-step",
    "split-attention",
    "fuse-gated-attention",
    "fuse-experts",
    "fuse-norm-gate-up",
    "fuse-norm-linear",
    "fuse-residual",
]
"""The stages that follow the common prefix of the decode and the standard pipeline."""

BLOCK = 4
BATCHES = ((9,), (1, 3, 4, 5, 14))
"""Lengths including the new token: one sequence, and five around block boundaries."""
Kept = dict[str, list[torch.Tensor]]
"""The caches and the states of each rank, by the names of the inputs that hold them."""
POOL = (11, 2, 7, 0, 9, 4, 12, 1, 8, 5, 10, 3, 6)


@dataclass(frozen=True)
class Filled:
    """The inputs of a decode step, and each rank's prefilled cache and states."""

    inputs: dict[str, torch.Tensor]
    kept: Kept
    expected: torch.Tensor
    """Hugging Face's logits of the new tokens."""


@dataclass(frozen=True)
class Ran:
    """All values of a step, and the caches and states after it."""

    values: Values
    kept: Kept

    @property
    def logits(self) -> torch.Tensor:
        first, *copies = logits_of(self.values)
        assert all(torch.equal(first, other) for other in copies)
        return first


def run_step(gm: fx.GraphModule, pair: Pair, inputs: dict[str, torch.Tensor], states: Kept) -> Ran:
    """Run a graph on simulated ranks with copies of these caches and states."""
    weights = materialise(gm, pair.read)
    gm = clone(gm)
    states = {name: [tensor.clone() for tensor in tensors] for name, tensors in states.items()}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name in states:
            node.op = "get_attr"  # they are given per rank, like weights
    with torch.inference_mode():
        values = run_ranks(gm, inputs, weights | states, pair.captured.rotary.fresh())
    return Ran(values, states)


def step_inputs(
    ids: Sequence[torch.Tensor], before: Sequence[int], tables: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the inputs for new tokens that follow `before` others, with the blocks of `tables`."""
    places = [torch.arange(first, first + len(new)) for first, new in zip(before, ids, strict=True)]
    slots = [
        table[place // BLOCK] * BLOCK + place % BLOCK
        for table, place in zip(tables, places, strict=True)
    ]
    counts = torch.tensor([len(new) for new in ids])
    return {
        "input_ids": torch.cat(list(ids)),
        "positions": torch.cat(places),
        "starts": torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]),
        "logit_rows": torch.arange(int(counts.sum())),
        "slots": torch.cat(slots),
        "tables": tables,
        "lengths": torch.tensor(before) + counts,
        "read": torch.arange(len(ids)),
        "write": torch.arange(len(ids)),
    }


def tables_for(lengths: Sequence[int]) -> torch.Tensor:
    """Return tables of scattered blocks for sequences of these lengths."""
    free = list(POOL)
    held = [[free.pop(0) for _ in range(-(-length // BLOCK))] for length in lengths]
    widest = max(map(len, held))
    return torch.tensor([[*blocks, *[-1] * (widest - len(blocks))] for blocks in held])


@lru_cache(maxsize=64)
def filled(model: str, tp: int, lengths: tuple[int, ...], interleaved: bool = False) -> Filled:
    """Prefill all tokens but the last of each sequence; return the step for the last ones."""
    pair = preset_pair(model)
    stages = decode_stages(model, tp, 1, interleaved)
    gm = next(stage for stage in stages if stage.name == "keep-states").graph
    ids, mask = padded(lengths, TINY_VOCABULARY)
    rows = [row[real.bool()] for row, real in zip(ids, mask, strict=True)]
    allocators = {
        CACHE: (empty_cache, len(POOL) * BLOCK),
        **dict.fromkeys((TAILS, STATES), (empty_states, len(rows))),
    }
    empty = {}
    for node in gm.graph.nodes:
        if node.name in allocators:
            empty_of, count = allocators[node.name]
            empty[node.name] = [empty_of(value_type(node), rank, count) for rank in range(tp)]
    tables = tables_for(lengths)
    prompt = step_inputs([row[:-1] for row in rows], [0] * len(rows), tables)
    states = run_step(gm, pair, prompt, empty).kept if len(prompt["input_ids"]) else empty
    inputs = step_inputs([row[-1:] for row in rows], [n - 1 for n in lengths], tables)
    with torch.inference_mode():
        expected = torch.cat([pair.eager(row[None]).logits[0, -1:] for row in rows])
    return Filled(inputs, states, expected)


def decode_stages(model: str, tp: int, spans: int, interleaved: bool = False) -> list[Stage]:
    return stages_of(preset_pair(model), decode_pipeline(tp, spans, BLOCK, interleaved))


@lru_cache(maxsize=64)
def _ran(model: str, passes: tuple[Pass, ...], tp: int, lengths: tuple[int, ...]) -> Ran:
    """Run the decode step of a stage."""
    pair, prefill = preset_pair(model), filled(model, tp, lengths)
    return run_step(graph_after(pair, passes), pair, prefill.inputs, prefill.kept)


@dataclass(frozen=True)
class DecodeStep:
    """A pass at its position, and the steps that run before and after it."""

    model: str
    tp: int
    plain: Step
    """The pass, for checks that run no decode step."""

    @property
    def before(self) -> Stage:
        return self.plain.before

    @property
    def after(self) -> Stage:
        return self.plain.after

    @cached_property
    def ran(self) -> list[tuple[Filled, Ran, Ran]]:
        """Run the steps before and after the pass on all batches."""
        return [
            (filled(self.model, self.tp, lengths), self._ran(-1, lengths), self._ran(None, lengths))
            for lengths in BATCHES
        ]

    def _ran(self, end: int | None, lengths: tuple[int, ...]) -> Ran:
        return _ran(self.model, self.plain.passes[:end], self.tp, lengths)

    def assert_same_bits(self) -> None:
        for _, before, after in self.ran:
            assert torch.equal(before.logits, after.logits)

    def assert_near(self) -> None:
        """Assert that logits match the previous stage and Hugging Face; caches and states match."""
        for prefill, before, after in self.ran:
            assert relative_error(after.logits, before.logits) < 1e-6
            assert relative_error(after.logits, prefill.expected) < TOLERANCE
            for name, tensors in before.kept.items():
                for expected, actual in zip(tensors, after.kept[name], strict=True):
                    assert torch.equal(expected.isnan(), actual.isnan())
                    assert relative_error(actual.nan_to_num(), expected.nan_to_num()) < 1e-6


@lru_cache
def decode_step(name: str, model: str = "tiny-qwen3", tp: int = 4, spans: int = 3) -> DecodeStep:
    """Return the pass `name` of the decode pipeline."""
    passes = decode_pipeline(tp, spans, BLOCK)
    return DecodeStep(model, tp, step_of(name, preset_pair(model), passes))
