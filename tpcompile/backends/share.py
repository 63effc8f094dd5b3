"""The memory that ranks share when each runs its part of a program in a process of its own.

It holds the buffers that instructions of several ranks touch, and the counters. Python cannot add
to an integer atomically, so each rank has its own row of counters, and a waiter sums the rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tpcompile.errors import RankError
from tpcompile.vm.program import Program
from tpcompile.vm.program.program import touched

_ALIGN = 64
"""The alignment of buffers and rows of counters: a cache line, in bytes."""

_LOOKS = 100
"""The number of times that a counter is polled before the first sleep."""

_REST_S = 50e-6


@dataclass(frozen=True)
class SharedLayout:
    """The offsets of shared buffers and counters, in bytes."""

    buffers: Mapping[int, int]
    """The offset of each shared buffer, by number."""
    counters: int
    """The offset of rank 0's row of counters. The rows of the other ranks follow."""
    row: int
    """The size of a row."""
    board: int
    """The offset of the board of workers, where executors record the activity of each worker."""
    size: int

    @classmethod
    def of(cls, program: Program) -> SharedLayout:
        """Lay out the buffers that several ranks touch, then the counters of each rank."""
        places, end = {}, 0
        for number in _shared_buffers(program):
            places[number] = end
            buffer = program.buffers[number]
            end += _aligned(math.prod(buffer.extents) * buffer.dtype.itemsize)
        row = _aligned(8 * program.counters)
        board = end + row * program.ranks
        return cls(places, end, row, board, board + board_size(program))


class RankShare:
    """A rank's view of shared memory."""

    def __init__(
        self,
        program: Program,
        rank: int,
        memory: Any,
        timeout: float = 60.0,
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """Attach to `memory`, a writable buffer of `SharedLayout.size` bytes, zero at first.

        An instruction that waits longer than `timeout` seconds raises a RankError, or sooner if
        `lost` says that another rank has ended.
        """
        layout = SharedLayout.of(program)
        self.rank = rank
        self.tensors: dict[int, torch.Tensor] = {}
        """The shared buffers by number."""
        for number, start in layout.buffers.items():
            buffer = program.buffers[number]
            count = math.prod(buffer.extents)
            flat = torch.frombuffer(memory, dtype=buffer.dtype, count=count, offset=start)
            self.tensors[number] = flat.view(buffer.extents)
        count = layout.row // 8 * program.ranks
        whole = torch.frombuffer(memory, dtype=torch.int64, count=count, offset=layout.counters)
        self.counters = whole.view(program.ranks, layout.row // 8)
        """`[ranks, counters]`: each rank signals in its own row."""
        self.board = torch.frombuffer(
            memory, dtype=torch.uint8, count=board_size(program), offset=layout.board
        )
        rows: Any = self.counters.view(-1).numpy()
        self._counters = memoryview(rows)
        self._row = layout.row // 8
        self.timeout, self.lost = timeout, lost
        self._steps = 0

    def order(self, program: Program) -> Iterator[int]:
        """Yield this rank's instructions in sequential order, each when its waits are met.

        An instruction counts as done when the next one is requested. Counters are never cleared,
        neither between steps nor between launches, so thresholds grow with the steps of all
        launches.
        """
        for number, instruction in enumerate(program.instructions):
            if instruction.rank != self.rank:
                continue
            for wait in program.waits[number]:
                signals = len(program.signallers[wait.counter])
                reached = wait.until + self._steps * signals
                if not self._comes(wait.counter, reached):
                    count = self.count(wait.counter)
                    raise self.missed(
                        instruction.label,
                        f"counter {wait.counter} at {count}",
                        f"at least {reached}",
                    )
            yield number
            for counter in program.signals[number]:
                self._counters[self.rank * self._row + counter] += 1
        self._steps += 1

    def missed(self, where: str, got: str = "", expected: str = "") -> RankError:
        """Return the error of an instruction whose wait timed out."""
        if self.lost():
            return RankError(
                "Another rank has ended",
                where=where,
                hint="See the output of the other ranks: one of them failed first",
            )
        return RankError(
            f"Rank {self.rank} waited {self.timeout:g} s for other ranks",
            where=where,
            got=got,
            expected=expected,
        )

    def _comes(self, counter: int, until: int) -> bool:
        """Wait until a counter reaches a value; return False on a timeout, or if it never will."""
        looks, end = 0, time.monotonic() + self.timeout
        while self.count(counter) < until:
            looks += 1
            if looks < _LOOKS:
                continue
            if self.lost() or time.monotonic() > end:
                return self.count(counter) >= until  # a rank that has ended may have signalled
            time.sleep(_REST_S)
        return True

    def count(self, counter: int) -> int:
        """Return the value of a counter: the sum of all ranks' rows."""
        return sum(self._counters[counter :: self._row])


def _shared_buffers(program: Program) -> list[int]:
    """Return the buffers that an instruction of another rank touches."""
    numbers = {
        region.buffer
        for instruction in program.instructions
        for region in touched(instruction)
        if program.buffers[region.buffer].rank != instruction.rank
    }
    return sorted(numbers)


def board_size(program: Program) -> int:
    """Return the size of the board of workers: one cache line for all, and one per worker."""
    return _ALIGN * (1 + len(program.queues) * program.sharing)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
