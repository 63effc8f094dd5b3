"""For each instruction the earlier ones that it conflicts with, as the verifier needs them.

An access is forgotten once every cell of it has been written over: whoever comes later conflicts
with those who wrote, and they come behind it, or the verifier has said that they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpcompile.vm.program import Program
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.conflict import Heads
from tpcompile.vm.proof.known import Several, several


@dataclass(eq=False, slots=True)
class _Use:
    """Instructions that have read a part, or written it, with no other write between them."""

    numbers: list[int]
    left: int
    """The cells that are not written over."""
    head: int | None = None
    """The one that they are blocks of."""
    several: Several | None = None
    """Once somebody must come behind them, and nobody is added any more."""

    def frozen(self) -> Several:
        if self.several is None:
            self.several = several(self.numbers)
        return self.several


class Earlier:
    """Of all instructions, in the order of the program."""

    def __init__(self, program: Program, heads: Heads) -> None:
        parts = Parts(program.instructions)
        self._cells, self._near = parts.cells, parts.near
        count = len(parts.near)
        self._read: list[list[_Use]] = [[] for _ in range(count)]
        self._written: list[_Use | None] = [None] * count
        self._writers: list[tuple[Several, ...] | None] = [None] * count
        """Those whose values a part holds, until something writes to it again."""
        self._blocks: dict[int, list[Several]] = {}
        """What the blocks of each head must come behind."""
        self.of: list[list[Several]] = []
        """Each instruction itself may be among them, if it touches the same part twice."""
        for number in range(len(program.instructions)):
            found: list[Several] = []
            for part in parts.reads[number]:
                found += self._reads(part, number)
            for part in parts.writes[number]:
                found += self._put(part, _Use([number], parts.cells[part]))
            for part, head in zip(parts.joins[number], heads.of[number], strict=True):
                found += self._joins(part, head, number)
            self.of.append(found)

    def _reads(self, part: int, number: int) -> tuple[Several, ...]:
        writers = self._writers[part]
        if writers is not None:
            self._read[part][-1].numbers.append(number)
            return writers
        cells = self._cells[part]
        self._read[part].append(_Use([number], cells))
        uses = [self._written[other] for other in self._near[part]]
        numbers = [n for use in uses if use and use.left & cells for n in use.numbers]
        writers = self._writers[part] = (several(numbers),) if numbers else ()
        return writers

    def _joins(self, part: int, head: int, number: int) -> list[Several]:
        written = self._written[part]
        if written is not None and written.head == head:
            written.numbers.append(number)
        else:
            self._blocks[head] = self._put(part, _Use([number], self._cells[part], head))
        return self._blocks[head]

    def _put(self, part: int, written: _Use) -> list[Several]:
        """Written over: whoever has read or written that."""
        cells = self._cells[part]
        found: list[Several] = []
        for other in self._near[part]:
            self._writers[other] = None
            old = self._written[other]
            if old is not None and old.left & cells:
                found.append(old.frozen())
                old.left &= ~cells
            if self._read[other]:
                for use in self._read[other]:
                    if use.left & cells:
                        found.append(use.frozen())
                        use.left &= ~cells
                self._read[other] = [use for use in self._read[other] if use.left]
        self._written[part] = written
        return found
