"""The parts of buffers that a program accesses, numbered, and cut into cells along all their edges.

A part is then a set of cells, stored as an integer with one bit per cell. Two parts overlap if
they share a cell, and a part has been overwritten once all its cells have been.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, count

from tpcompile.vm.program import Box, Instruction, Region


class Parts:
    """The accessed parts of the buffers that some instruction writes.

    Buffers that no instruction writes are left out, because no instruction waits for them.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = instructions
        joined = [instruction.joins for instruction in instructions]
        written = {region[0] for i in instructions for region in i.writes}
        written |= {join.region[0] for joins in joined for join in joins}
        self._numbers: dict[Region, int] = defaultdict(count().__next__)
        self.reads: list[list[int]] = []
        """By instruction, the numbers of the parts that it reads in buffers that are written."""
        self.writes: list[list[int]] = []
        self.joins: list[list[int]] = []
        numbers = self._numbers
        self._constant: set[Region] = set()
        """The regions of buffers that no instruction writes."""
        for instruction, joins in zip(instructions, joined, strict=True):
            reads = instruction.reads
            self._constant.update([r for r in reads if r[0] not in written])
            self.reads.append([numbers[r] for r in reads if r[0] in written])
            self.writes.append([numbers[r] for r in instruction.writes])
            self.joins.append([numbers[join.region] for join in joins])
        self.cells = [0] * len(self._numbers)
        """The cells of each part, as bits. Compare them only with those of parts in `near`."""
        self.near: list[tuple[int, ...]] = [()] * len(self._numbers)
        """For each part, the parts that overlap it, including itself."""
        self._cut()

    @property
    def regions(self) -> Iterator[Region]:
        """All regions that the instructions access, each once."""
        return chain(self._numbers, self._constant)

    def _cut(self) -> None:
        boxes: dict[int, list[Box]] = {}
        numbers: dict[int, list[int]] = {}
        for region, number in self._numbers.items():
            boxes.setdefault(region.buffer, []).append(region.box)
            numbers.setdefault(region.buffer, []).append(number)
        alike: dict[tuple[Box, ...], list[tuple[int, list[int]]]] = {}
        for buffer, own in numbers.items():
            kind = tuple(boxes[buffer])
            if kind not in alike:  # most buffers have the same parts on every rank
                alike[kind] = cut(kind)
            for number, (cells, near) in zip(own, alike[kind], strict=True):
                self.cells[number] = cells
                self.near[number] = tuple(own[other] for other in near)


def cut(boxes: Sequence[Box]) -> list[tuple[int, list[int]]]:
    """Return, for each box of one buffer, its cells and the boxes that overlap it, by number."""
    found: list[tuple[int, list[int]]] = [(0, [])] * len(boxes)
    for apart in _clusters(boxes):
        masks = _masks([boxes[number] for number in apart])
        for number, mask in zip(apart, masks, strict=True):
            near = [n for n, other in zip(apart, masks, strict=True) if mask & other]
            found[number] = mask, near
    return found


def _clusters(boxes: Sequence[Box]) -> list[list[int]]:
    """Group boxes that may overlap; boxes of different clusters are disjoint in some dimension."""
    clusters = [list(range(len(boxes)))]
    for dim in range(len(boxes[0]) if boxes else 0):
        split: list[list[int]] = []
        for cluster in clusters:
            reached = -1
            for number in sorted(cluster, key=lambda number: boxes[number][dim]):
                start, stop = boxes[number][dim]
                if start >= reached:
                    split.append([])
                split[-1].append(number)
                reached = max(reached, stop)
        clusters = split
    return clusters


def _masks(boxes: Sequence[Box]) -> list[int]:
    """Return the cells of each box as a bit mask; cells are numbered row by row."""
    masks, inner = [1] * len(boxes), 1
    for dim in reversed(range(len(boxes[0]))):
        edges = sorted({edge for box in boxes for edge in box[dim]})
        place = {edge: number for number, edge in enumerate(edges)}
        for number, box in enumerate(boxes):
            start, stop = place[box[dim][0]], place[box[dim][1]]
            masks[number] = _repeated(masks[number], range(start, stop), inner)
        inner *= len(edges) - 1
    return masks


def _repeated(mask: int, rows: range, width: int) -> int:
    """Repeat the mask of one row in each of these rows, which are `width` bits wide."""
    if width == 1:
        return ((1 << len(rows)) - 1) << rows.start
    found = 0
    for row in rows:
        found |= mask << row * width
    return found
