"""The earlier conflicting instructions of each instruction, for the verifier.

An access is dropped once all its cells have been overwritten. A later instruction conflicts with
the overwriting instructions, and these run after the dropped access, or the verifier has already
reported that this is not guaranteed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpcompile.vm.program import Program
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.conflict import Heads
from tpcompile.vm.proof.known import Several, several


@dataclass(eq=False, slots=True)
class _Use:
    """The instructions that have read, or written, a part with no other write between them."""

    numbers: list[int]
    left: int
    """The cells that have not been overwritten."""
    head: int | None = None
    """The number of the head that the instructions are blocks of, if they are blocks."""
    several: Several | None = None
    """`numbers` as a set, made when a later instruction first conflicts with them. No number is
    added from then on."""

    def frozen(self) -> Several:
        if self.several is None:
            self.several = several(self.numbers)
        return self.several


class Earlier:
    """The earlier conflicting instructions of every instruction, found in program order."""

    def __init__(self, program: Program, heads: Heads, parts: Parts | None = None) -> None:
        parts = Parts.of(program.instructions, parts)
        self._cells, self._near = parts.cells, parts.near
        count = len(parts.near)
        self._read: list[list[_Use]] = [[] for _ in range(count)]
        self._written: list[_Use | None] = [None] * count
        self._writers: list[tuple[Several, ...] | None] = [None] * count
        """The last writers of each part, until it is written again."""
        self._blocks: dict[int, list[Several]] = {}
        """By head, the instructions that its blocks must run after."""
        self.by_instruction: list[list[Several]] = []
        """By instruction, sets of earlier instructions. They may include the instruction itself, if
        it accesses the same part twice."""
        for number in range(len(program.instructions)):
            sets: list[Several] = []
            for part in parts.reads[number]:
                sets += self._reads(part, number)
            for part in parts.writes[number]:
                sets += self._put(part, _Use([number], parts.cells[part]))
            for part, head in zip(parts.joins[number], heads.by_instruction[number], strict=True):
                sets += self._joins(part, head, number)
            self.by_instruction.append(sets)

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
        """Record a write of the part; return the reads and writes that it overwrites."""
        cells = self._cells[part]
        overwritten: list[Several] = []
        for other in self._near[part]:
            self._writers[other] = None
            old = self._written[other]
            if old is not None and old.left & cells:
                overwritten.append(old.frozen())
                old.left &= ~cells
            if self._read[other]:
                for use in self._read[other]:
                    if use.left & cells:
                        overwritten.append(use.frozen())
                        use.left &= ~cells
                self._read[other] = [use for use in self._read[other] if use.left]
        self._written[part] = written
        return overwritten
