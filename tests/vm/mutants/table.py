"""Mutants of all kinds, with the results of the verifier and of the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from tests.vm.mutants.bases import Base, bases
from tests.vm.mutants.defined import DEFINED
from tests.vm.mutants.heads import HEADS
from tests.vm.mutants.judge import Judge
from tests.vm.mutants.orders import ORDERS, Made
from tests.vm.mutants.regions import REGIONS
from tests.vm.mutants.traps import TRAPS
from tpcompile.vm.program import Program
from tpcompile.vm.proof.verify import check_program

Kind = Callable[[Base, Random], Made]

KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        *ORDERS,
        *REGIONS,
        *HEADS,
        *DEFINED,
        *(trap for kinds in TRAPS.values() for trap in kinds),
    )
}


@dataclass(frozen=True, eq=False)
class Mutant:
    """A program with one mistake, and the correct program that it is derived from."""

    kind: str
    base: Base
    what: str
    program: Program

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} ({self.base})"


@lru_cache(maxsize=1)
def all_bases() -> list[Base]:
    return bases()


def mutants_of(
    kind: str, count: int, seed: int = 0, bases: Sequence[Base] | None = None
) -> Iterator[Mutant]:
    """Yield up to `count` distinct mutants, unequal to their bases, alternating between bases."""
    bases = bases or all_bases()
    dice = Random(f"{kind} {seed}")
    keys: set[int] = set()
    new_at = 0
    for attempt in range(40 * count):
        if len(keys) == count or attempt > new_at + 4 * len(bases):
            return  # there are no more, or they are hard to find
        base = bases[attempt % len(bases)]
        mutation = KINDS[kind](base, dice)
        if mutation is None or _alike(mutation[1], base.program):
            continue
        description, program = mutation
        change = description if program.instructions != base.program.instructions else ""
        schedule = program.waits, program.signals, program.queues, program.sharing
        key = hash((base.case, change, *schedule))
        if key not in keys:
            keys.add(key)
            new_at = attempt
            yield Mutant(kind, base, description, program)


def _alike(program: Program, other: Program) -> bool:
    same = program.instructions is other.instructions or program.instructions == other.instructions
    return (
        same
        and (program.waits, program.signals) == (other.waits, other.signals)
        and (program.queues, program.sharing) == (other.queues, other.sharing)
    )


@dataclass
class Count:
    """The results for the mutants of one kind."""

    mutants: int = 0
    unsafe: int = 0
    refused: int = 0
    safe_refused: int = 0

    @property
    def safe(self) -> int:
        return self.mutants - self.unsafe

    @property
    def unsafe_accepted(self) -> int:
        return self.unsafe - (self.refused - self.safe_refused)

    def add(self, other: Count) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def judged(kind: str, count: int, seed: int = 0) -> tuple[Count, list[Mutant]]:
    """Return the results for `count` mutants, and those on which verifier and oracle disagree."""
    counts, strange = Count(), []
    judge = Judge()
    for mutant in mutants_of(kind, count, seed):
        unsafe = judge.broken(mutant.program)
        refused = bool(check_program(mutant.program, mutant.base.parts))
        counts.add(Count(1, unsafe, refused, refused and not unsafe))
        if unsafe is not refused:
            strange.append(mutant)
    return counts, strange
