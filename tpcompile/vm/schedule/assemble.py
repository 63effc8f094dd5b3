"""Assembly of instructions into a program: dependencies, queues, and waits and signals."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

from tpcompile.errors import UsageError
from tpcompile.pause import paused_collector
from tpcompile.phases import timed
from tpcompile.vm.program import Buffer, Instruction, Program
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.counters import Ordering, assign_counters
from tpcompile.vm.proof.dependencies import dependencies_of
from tpcompile.vm.proof.waiting import Groups, Uses
from tpcompile.vm.schedule.layers import Layers, repeated_layers
from tpcompile.vm.schedule.list_schedule import tails
from tpcompile.vm.schedule.policies import DEFAULT_POLICY, POLICIES, Queues, schedule


@dataclass(frozen=True)
class Assembled:
    """A program, the parts of buffers that it accesses, and the time of each phase."""

    program: Program
    parts: Parts
    """The parts of buffers that the instructions access, which the verifier needs too."""
    seconds: dict[str, float]
    """The time that each phase took."""
    _groups: Groups
    """The dependencies that the program was made from."""
    _layers: Layers | None = None
    """The layers, if some of them are left out in `_groups`."""

    @property
    def copied(self) -> bool:
        """Whether some layers are copies of others."""
        return self._layers is not None

    @cached_property
    def groups(self) -> Groups:
        """For each instruction, the groups that must complete before it starts, on any worker."""
        return self._groups if self._layers is None else Uses(dependencies_of(self.parts))

    def longest(self, costs: Sequence[float]) -> float:
        """Return the time of a step with unlimited workers, given the times of instructions."""
        if self._layers is not None:
            longest = self._layers.longest(tails(self._groups, self._layers.few(costs)))
            if longest is not None:
                return longest
        return max(tails(self.groups, costs), default=0.0)


@paused_collector()
def assemble(
    name: str,
    buffers: Sequence[Buffer],
    instructions: Sequence[Instruction],
    costs: Sequence[float],
    policy: str = DEFAULT_POLICY,
    workers: int = 1,
    ranks: int = 1,
    repeats: bool = False,
    layers: Sequence[int] = (),
) -> Assembled:
    """Make a program of these instructions for `workers` workers on each rank; it is not verified.

    The policy uses `costs` as the times of the instructions. If the program `repeats`, no step
    starts before the previous one is complete. With `layers`, the layer of each instruction or -1,
    layers that repeat are assembled once.
    """
    for instruction in instructions:
        if not 0 <= instruction.rank < ranks:
            raise UsageError(
                f"{instruction.label} belongs to rank {instruction.rank}, which does not exist",
                expected=f"a rank from 0 to {ranks - 1}",
            )
    work = _Assembly(policy, workers, ranks, repeats)
    ranks_of = [instruction.rank for instruction in instructions]
    with work.timed("dependencies"):
        parts = Parts(tuple(instructions))
        repeated = repeated_layers(parts, layers, ranks_of, costs)
    ordered = None if repeated is None else work.with_copies(repeated, parts, ranks_of, costs)
    if ordered is None:
        repeated, ordered = None, work.ordered(parts, ranks_of, costs)
    program = Program(
        tuple(buffers),
        tuple(parts.instructions),
        ordered.queues,
        ordered.ordering.waits,
        ordered.ordering.signals,
        ranks,
        work.sharing,
        repeats,
        name,
    )
    return Assembled(program, parts, work.seconds, ordered.groups, repeated)


@dataclass(frozen=True)
class _Ordered:
    """The queues and counters of a program, and the dependencies that they were made from."""

    groups: Groups
    queues: Queues
    ordering: Ordering


@dataclass(frozen=True)
class _Assembly:
    """The options of an assembly, and the time that each phase has taken so far."""

    policy: str
    workers: int
    ranks: int
    repeats: bool
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def sharing(self) -> int:
        return self.workers if POLICIES[self.policy].dynamic else 1

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Add the time of the block to that of a phase."""
        return timed(self.seconds, phase)

    def ordered(self, parts: Parts, ranks_of: Sequence[int], costs: Sequence[float]) -> _Ordered:
        """Find the dependencies of instructions, schedule them, and assign counters."""
        with self.timed("dependencies"):
            groups = Uses(dependencies_of(parts))
        with self.timed("schedule"):
            queues = schedule(self.policy, groups, costs, self.workers, ranks_of, self.ranks)
        with self.timed("counters"):
            ordering = assign_counters(groups, queues, self.sharing, self.repeats)
        return _Ordered(groups, queues, ordering)

    def with_copies(
        self, layers: Layers, parts: Parts, ranks_of: Sequence[int], costs: Sequence[float]
    ) -> _Ordered | None:
        """Do the same with few layers, and copy the others; None if the layers do not repeat."""
        few = self.ordered(parts.without(layers.left_out), layers.few(ranks_of), layers.few(costs))
        with self.timed("schedule"):
            queues = layers.queues(few.queues)
        with self.timed("counters"):
            ordering = None if queues is None else layers.ordering(few.ordering)
        if queues is None or ordering is None:
            return None
        return _Ordered(few.groups, queues, ordering)
