"""Programs lowered from small real models, which mutants are derived from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from tests.backends.reference.step_models import (
    APART,
    BIASED,
    DELTA_APART,
    GELU,
    INT4,
    INT4_WIDE,
    INT8,
    RELU2,
    SHARED,
    WHOLE,
)
from tests.backends.reference.stepping import Case
from tpcompile.vm.lowering import StepPlan
from tpcompile.vm.program import Instruction, Join, Program, Region
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.schedule.assemble import assemble
from tpcompile.vm.schedule.policies import POLICIES
from tpcompile.vm.targets import target_of

MODELS = ("tiny-qwen2", "tiny-qwen3", "qwen2.5-0.5b")
"""With biases, with per-head norms, and with heads that 2 and 3 ranks split unevenly."""

_ROW_WORKERS = {1: 12, 2: 6, 3: 7}
"""Workers per number of ranks, such that heads are cut into blocks."""


@dataclass(frozen=True)
class FineCase(Case):
    """Case with a grain so small that heads consist of several blocks of rows."""

    grain: int = 4

    @property
    def plan(self) -> StepPlan:
        return replace(super().plan, grain=self.grain)


@dataclass(frozen=True)
class Base:
    """A program and the case that it was scheduled for."""

    case: FineCase

    @cached_property
    def program(self) -> Program:
        return self.case.program

    @cached_property
    def steps(self) -> tuple[StepInstruction, ...]:
        """Return its instructions with their real types."""
        return tuple(i for i in self.program.instructions if isinstance(i, StepInstruction))

    @cached_property
    def costs(self) -> tuple[float, ...]:
        target = target_of("cpu", self.case.workers)
        return tuple(step.cost(target) for step in self.steps)

    @cached_property
    def parts(self) -> Parts:
        """Return what the verifier derives from the instructions, once for all mutants."""
        return Parts(self.program.instructions)

    def scheduled_as(self, instructions: Sequence[Instruction]) -> Program:
        """Schedule by the regions of `instructions`, but keep the real ones."""
        program, case = self.program, self.case
        assembled = assemble(
            program.name,
            program.buffers,
            instructions,
            self.costs,
            case.policy,
            case.workers,
            program.ranks,
            program.repeats,
        )
        return replace(assembled.program, instructions=program.instructions)

    def __str__(self) -> str:
        case = self.case
        return (
            f"{case.model} tp={case.tp} {case.lowering} {case.policy} {case.workers} workers "
            f"batch {len(case.lengths)}"
        )


@dataclass(frozen=True)
class Described:
    """Instruction with other declared regions, or with moved buffers."""

    true: StepInstruction
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    joins: tuple[Join, ...] = ()
    moved: tuple[tuple[int, int], ...] = ()
    """Buffers that are replaced by others."""

    @property
    def rank(self) -> int:
        return self.true.rank

    @property
    def name(self) -> str:
        return self.true.name

    @property
    def label(self) -> str:
        return self.true.label

    def run(self, memory: Sequence[object], probe: object) -> None:
        places = list(memory)
        for old, new in self.moved:
            places[old] = places[new]
        self.true.run(places, probe)  # type: ignore[arg-type]


def described(true: StepInstruction) -> Described:
    """Return an unchanged description."""
    return Described(true, true.reads, true.writes, true.joins)


@dataclass(frozen=True)
class Missing(Described):
    """Instruction that does nothing."""

    def run(self, memory: Sequence[object], probe: object) -> None:
        pass


def missing(true: StepInstruction) -> Missing:
    """Return an instruction that does nothing in the place of this one."""
    return Missing(true, (), ())


def bases() -> list[Base]:
    """Return all models, ranks and lowerings, with alternating policies, batches and splits."""
    cases = []
    ways = product(MODELS, (1, 2, 3), ("heads", "rows"))
    policies = list(POLICIES)
    for number, (model, tp, lowering) in enumerate(ways):
        for turn in range(1 if (tp, lowering) == (3, "rows") else 2):
            policy = policies[(2 * number + turn) % len(policies)]
            several = (number + turn) % 3 == 0
            workers = 2 + turn if lowering == "heads" else _ROW_WORKERS[tp] + turn
            cases.append(
                FineCase(
                    model,
                    tp,
                    # 3 blocks, so that no span is empty
                    lengths=(9, 10) if several and lowering == "heads" else (9,),
                    spans=1 + (number + turn) % 3,
                    lowering=lowering,
                    policy=policy,
                    workers=workers,
                    column_splits=1 + turn if lowering == "heads" else 1,
                )
            )
    linear = (
        FineCase("tiny-qwen3.5", 2, lengths=(9, 10), workers=3),
        FineCase(DELTA_APART, 1, lengths=(9,), workers=3),
    )
    experts = (
        FineCase(SHARED, 2, lengths=(9, 10), workers=3),
        FineCase(WHOLE, 2, lengths=(9,), workers=3),
    )
    return [Base(case) for case in (*cases, *_biased(), *_few_bits(), *linear, *experts)]


def _biased() -> list[FineCase]:
    """Return cases with more biases: all linears but the head, and MLPs of other activations."""
    return [
        FineCase(BIASED, 1, lengths=(9, 10), column_splits=2, workers=2, policy="zigzag"),
        FineCase(BIASED, 2, lengths=(9,), lowering="rows", workers=6),
        FineCase(GELU, 2, lengths=(9,), workers=2),
        FineCase(RELU2, 1, lengths=(9, 10), workers=3),
        FineCase(APART, 1, lengths=(9, 10), workers=3),
        FineCase(APART, 2, lengths=(9,), lowering="rows", workers=6),
    ]


def _few_bits() -> list[FineCase]:
    """Return cases with weights of 4 and 8 bits, of which ranks and column splits cut groups."""
    return [
        FineCase(INT4, 1, lengths=(9, 10), column_splits=2, workers=3, policy="zigzag"),
        FineCase(INT4, 2, lengths=(9,), workers=2),
        FineCase(INT4_WIDE, 3, lengths=(9,), lowering="rows", workers=7),
        FineCase(INT8, 3, lengths=(9,), workers=2, policy="round-robin"),
        FineCase(INT8, 1, lengths=(9,), lowering="rows", workers=12),
    ]
