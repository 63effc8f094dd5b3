"""Programs lowered from small models, for tests that need all kinds of instructions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import fx

from tests.backends.reference.step_models import (
    APART,
    DELTA_APART,
    GELU,
    RELU2,
    SHARED,
    WHOLE,
    decode_passes,
    pair_named,
)
from tests.passes.decoding import BLOCK
from tests.stages import graph_after
from tpcompile.vm.lowering import Lowered, StepPlan, lower
from tpcompile.vm.program import Program
from tpcompile.vm.schedule.assemble import assemble
from tpcompile.vm.targets import TARGETS

WORKERS = 7


@dataclass(frozen=True)
class Case:
    """A model and its lowering."""

    model: str = "tiny-qwen3"
    tp: int = 1
    lowering: str = "heads"
    splits: int = 1
    interleaved: bool = False
    batch: int = 2
    spans: int = 2

    def __str__(self) -> str:
        words = [self.model, f"tp{self.tp}", self.lowering, f"{self.splits}x{self.spans}"]
        return "-".join([*words, "interleaved"] if self.interleaved else words)


CASES = (
    Case(),
    Case("tiny-qwen2", 1, "rows", interleaved=True, batch=1, spans=1),
    Case("tiny-qwen2", 3, "heads", interleaved=True, spans=3),
    Case("tiny-qwen3", 3, "rows", batch=1),
    Case("tiny-qwen3", 1, "heads", splits=4),
    Case(GELU, 2, batch=1),
    Case(RELU2, 3, "rows"),
    Case(APART, 2, "rows"),
    Case("tiny-qwen3.5", 2, "rows"),
    Case(DELTA_APART, 3, "rows"),
    Case(WHOLE, 3, "rows"),
    Case(SHARED, 2),
)
"""Together they contain all instruction kinds, with and without biases and per-head norms."""


@lru_cache
def graph(model: str, tp: int, spans: int, interleaved: bool) -> fx.GraphModule:
    passes = decode_passes(model, tp, spans, BLOCK, interleaved)
    return graph_after(pair_named(model), passes)


@lru_cache
def lowered(case: Case) -> Lowered:
    plan = StepPlan(
        workers=WORKERS,
        batch=case.batch,
        max_seq_len=32,
        context=32,
        lowering=case.lowering,
        column_splits=case.splits,
        grain=4,
        steps=4,
        stops=2,
    )
    return lower(graph(case.model, case.tp, case.spans, case.interleaved), plan)


@lru_cache
def step_program(case: Case, policy: str = "critical-path") -> Program:
    low = lowered(case)
    costs = [instruction.cost(TARGETS["cpu"]) for instruction in low.instructions]
    return assemble(
        low.name, low.buffers, low.instructions, costs, policy, WORKERS, low.ranks, repeats=True
    ).program
