"""A program: instructions in the order that gives them meaning, and how workers share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tpcompile.vm.region import Buffer, Region


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
