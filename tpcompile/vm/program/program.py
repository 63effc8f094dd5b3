"""A program: instructions in the order that gives them meaning, and how workers share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from tpcompile.vm.program.region import Buffer, Join, Region


class Instruction(Protocol):
    """What every instruction tells: what it touches, and what it is called in messages."""

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
    """An instruction starts when a counter has come to `until`."""

    counter: int
    until: int


@dataclass(frozen=True)
class Program:
    """Instructions, queues and counters of one step.

    The meaning is that of the instructions one after the other. Workers run their queues at
    once; `waits` and `signals` of each instruction keep what conflicts in that order.
    """

    buffers: tuple[Buffer, ...]
    instructions: tuple[Instruction, ...]
    queues: tuple[tuple[int, ...], ...]
    """The instructions of each worker, by number, in the order in which it runs them.

    The queues are dealt evenly to the ranks, the first ones to rank 0.
    """
    waits: tuple[tuple[Wait, ...], ...]
    signals: tuple[tuple[int, ...], ...]
    """The counters that an instruction raises by one when it is done."""
    ranks: int = 1
    sharing: int = 1
    """How many workers take from each queue.

    Where there are several, each takes the next instruction from the front, and only then waits
    for what that must wait for: the next ones may overtake it, and counters alone order them.
    The verifier proves such a program for any number of workers at a queue, so an executor may
    start more or fewer; one that only this number makes safe is refused.
    """
    repeats: bool = False
    """Whether step follows step in one launch.

    Counters are never cleared: in step s an instruction waits until a counter has come to `until`
    and s times the signals that it gets in one step. `Wait(counter, 0)` is met at once in the
    first step; in each later one it waits for all signals of the step before, and with a number
    below 0 for so many less.
    """
    name: str = ""

    @cached_property
    def counters(self) -> int:
        """How many there are."""
        used = [counter for own in self.signals for counter in own]
        used += [wait.counter for own in self.waits for wait in own]
        return 1 + max(used, default=-1)

    @cached_property
    def signallers(self) -> tuple[tuple[int, ...], ...]:
        """By counter, the instructions that raise it in a step, as often as they do."""
        found: list[list[int]] = [[] for _ in range(self.counters)]
        for number, own in enumerate(self.signals):
            for counter in own:
                found[counter].append(number)
        return tuple(map(tuple, found))


def queue_by_instruction(queues: Sequence[Sequence[int]]) -> dict[int, int]:
    """Which queue each instruction is in."""
    return {number: place for place, queue in enumerate(queues) for number in queue}
