"""A program: instructions in sequential order, and their distribution over workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol

from tpcompile.errors import UsageError
from tpcompile.vm.program.buffer import Buffer, Role
from tpcompile.vm.program.region import Join, Region


class Instruction(Protocol):
    """The interface of instructions: their kind, the regions they touch, and a label."""

    @property
    def name(self) -> str:
        """The kind of instruction, in snake case: its one spelling in all output."""

    @property
    def rank(self) -> int: ...

    @property
    def reads(self) -> Sequence[Region]: ...

    @property
    def writes(self) -> Sequence[Region]: ...

    @property
    def joins(self) -> Sequence[Join]: ...

    @property
    def label(self) -> str: ...


class Wait(NamedTuple):
    """A condition for the start of an instruction: the counter has reached `until`."""

    counter: int
    until: int


@dataclass(frozen=True)
class Program:
    """Instructions, queues and counters of one step.

    The meaning of a program is the sequential execution of its instructions. Workers run their
    queues concurrently; `waits` and `signals` keep conflicting instructions in sequential order.
    """

    buffers: tuple[Buffer, ...]
    instructions: tuple[Instruction, ...]
    queues: tuple[tuple[int, ...], ...]
    """The instruction numbers of each queue, in the order in which its workers take them.

    Each rank has the same number of queues; the first ones belong to rank 0.
    """
    waits: tuple[tuple[Wait, ...], ...]
    signals: tuple[tuple[int, ...], ...]
    """For each instruction, the counters that it increments when it is done."""
    ranks: int = 1
    sharing: int = 1
    """The number of workers that take from each queue.

    If there are several, each claims the next instruction from the front and only then waits for
    its counters; another worker may take the claim over. Later instructions may overtake it, so
    counters alone order them. The verifier proves such a program for any number of workers per
    queue, so an executor may start more or fewer. A program that is safe only for this number is
    refused.
    """
    repeats: bool = False
    """Whether one launch runs several steps.

    Counters are never cleared. In step s an instruction waits until a counter has reached `until`
    plus s times its signals in one step. `Wait(counter, 0)` is met at once in the first step; in
    each later step it waits for all signals of the step before. `Wait(counter, -n)` waits for n
    signals fewer.
    """
    name: str = ""

    @cached_property
    def counters(self) -> int:
        used = [counter for counters in self.signals for counter in counters]
        used += [wait.counter for waits in self.waits for wait in waits]
        return 1 + max(used, default=-1)

    @cached_property
    def signallers(self) -> tuple[tuple[int, ...], ...]:
        """For each counter, the instructions that signal it in a step, repeated for each signal."""
        signallers: list[list[int]] = [[] for _ in range(self.counters)]
        for number, counters in enumerate(self.signals):
            for counter in counters:
                signallers[counter].append(number)
        return tuple(map(tuple, signallers))

    @cached_property
    def _roles(self) -> Mapping[Role, tuple[int, ...]]:
        numbers: dict[Role, list[int]] = {}
        for number, buffer in enumerate(self.buffers):
            numbers.setdefault(buffer.role, []).append(number)
        return {
            role: tuple(sorted(members, key=lambda number: self.buffers[number].rank))
            for role, members in numbers.items()
        }

    @cached_property
    def _one_per_rank(self) -> Mapping[Role, tuple[int, ...]]:
        """The buffers of the roles of which each rank has one."""
        ranks = list(range(self.ranks))
        return {
            role: numbers
            for role, numbers in self._roles.items()
            if [self.buffers[number].rank for number in numbers] == ranks
        }

    @cached_property
    def roles(self) -> frozenset[Role]:
        """The roles of which there are buffers."""
        return frozenset(self._roles)

    def one_per_rank(self, role: Role) -> tuple[int, ...]:
        """Return the buffer of this role on each rank; raise if a rank has none or several."""
        if role not in self._one_per_rank:
            raise UsageError(
                f"Each rank must have one buffer of role {role.word}",
                got=f"buffers {[*self._roles.get(role, ())]} for {self.ranks} ranks",
            )
        return self._one_per_rank[role]


def joined(instruction: Instruction) -> list[Region]:
    return [join.region for join in instruction.joins]


def touched(instruction: Instruction) -> Iterator[Region]:
    """Yield all regions that an instruction reads, writes or joins."""
    return chain(instruction.reads, instruction.writes, joined(instruction))


def queue_by_instruction(queues: Sequence[Sequence[int]]) -> dict[int, int]:
    return {number: place for place, queue in enumerate(queues) for number in queue}
