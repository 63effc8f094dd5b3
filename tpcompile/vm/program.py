"""A program: instructions in the order that gives them meaning, and how workers share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Protocol

from tpcompile.vm.region import Buffer, Region, overlap


class Instruction(Protocol):
    """What every instruction tells: what it touches, and what it is called in messages."""

    @property
    def reads(self) -> Sequence[Region]: ...

    @property
    def writes(self) -> Sequence[Region]: ...

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
    """The instructions of each worker, by number, in the order in which it runs them."""
    waits: tuple[tuple[Wait, ...], ...]
    signals: tuple[tuple[int, ...], ...]
    """The counters that an instruction raises by one when it is done."""

    @property
    def counters(self) -> int:
        """How many there are."""
        used = [counter for own in self.signals for counter in own]
        used += [wait.counter for own in self.waits for wait in own]
        return 1 + max(used, default=-1)


def worker_by_instruction(queues: Sequence[Sequence[int]]) -> dict[int, int]:
    """Which queue each instruction is in."""
    return {number: worker for worker, queue in enumerate(queues) for number in queue}


def conflict(program: Program, one: int, other: int) -> tuple[Region, Region] | None:
    """What both touch and at least one of them writes."""
    first, second = program.instructions[one], program.instructions[other]
    pairs: Iterator[tuple[Region, Region]] = (
        pair
        for groups in (
            (first.writes, second.reads),
            (first.reads, second.writes),
            (first.writes, second.writes),
        )
        for pair in product(*groups)
    )
    return next(
        (p for p in pairs if p[0].buffer == p[1].buffer and overlap(p[0].box, p[1].box)), None
    )
