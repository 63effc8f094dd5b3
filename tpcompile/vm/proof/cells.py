"""The parts of buffers that a program accesses, numbered, and cut into cells along all their edges.

A part is then a set of cells, stored as an integer with one bit per cell. Two parts overlap if
they share a cell, and a part has been overwritten once all its cells have been.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from itertools import count

from tpcompile.vm.program import Box, Instruction, Region


class Parts:
    """The accessed parts of the buffers that some instruction writes.

    Buffers that no instruction writes are left out, because no instruction waits for them.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = instructions
        written = {region[0] for instruction in instructions for region in instruction.writes}
        written |= {join.region[0] for instruction in instructions for join in instruction.joins}
        self.written = written
        """The buffers that some instruction writes."""
        self._numbers: dict[Region, int] = defaultdict(count().__next__)
        self.reads: list[list[int]] = []
        """By instruction, the numbers of the parts that it reads in buffers that are written."""
        self.writes: list[list[int]] = []
        self.joins: list[list[int]] = []
        self.arrivals: list[list[int]] = []
        """By instruction, the number of blocks of each head that it joins."""
        self.read_first: list[int] = []
        """The parts whose first access is a read."""
        numbers = self._numbers
        constant: dict[int, list[Box]] = defaultdict(list)
        for instruction in instructions:
            reads: list[int] = []
            before = len(numbers)
            for region in instruction.reads:
                if region[0] in written:
                    reads.append(numbers[region])
                else:
                    constant[region[0]].append(region[1])
            if len(numbers) > before:
                self.read_first += range(before, len(numbers))
            self.reads.append(reads)
            self.writes.append([numbers[region] for region in instruction.writes])
            joins = instruction.joins
            self.joins.append([numbers[join.region] for join in joins])
            self.arrivals.append([join.arrivals for join in joins])
        self.boxes: dict[int, list[Box]] = constant
        """By buffer, all boxes that instructions access. A box may occur more than once."""
        self.cells = [0] * len(self._numbers)
        """The cells of each part, as bits. Compare them only with those of parts in `near`."""
        self.near: list[tuple[int, ...]] = [()] * len(self._numbers)
        """For each part, the parts that overlap it, including itself."""
        self._cut()

    @staticmethod
    def of(instructions: Sequence[Instruction], known: Parts | None) -> Parts:
        """Return `known` if it was made from these instructions, and otherwise make their parts."""
        return known if known and known.instructions is instructions else Parts(instructions)

    @property
    def regions(self) -> list[Region]:
        """The region of each part."""
        return list(self._numbers)  # parts are numbered in the order in which they were added

    def accesses(self, start: int, stop: int) -> list[int]:
        """Return the parts that some instructions access. Parts are numbered by first access."""
        accessed = self.reads[start:stop], self.writes[start:stop], self.joins[start:stop]
        return [part for lists in accessed for parts in lists for part in parts]

    def without(self, left_out: slice) -> Parts:
        """Return the parts of the same program without some of its instructions."""
        remaining = copy(self)
        for name in ("instructions", "reads", "writes", "joins", "arrivals"):
            lists = getattr(self, name)
            setattr(remaining, name, lists[: left_out.start] + lists[left_out.stop :])
        return remaining

    def _cut(self) -> None:
        numbers: dict[int, list[int]] = {}
        for region, number in self._numbers.items():
            self.boxes[region.buffer].append(region.box)
            numbers.setdefault(region.buffer, []).append(number)
        cuts: dict[tuple[Box, ...], list[tuple[int, list[int]]]] = {}
        for buffer, parts in numbers.items():
            kind = tuple(self.boxes[buffer])
            if kind not in cuts:  # most buffers have the same parts on every rank
                cuts[kind] = cut(kind)
            for number, (cells, near) in zip(parts, cuts[kind], strict=True):
                self.cells[number] = cells
                self.near[number] = tuple(parts[other] for other in near)


def cut(boxes: Sequence[Box]) -> list[tuple[int, list[int]]]:
    """Return, for each box of one buffer, its cells and the boxes that overlap it, by number."""
    pairs: list[tuple[int, list[int]]] = [(0, [])] * len(boxes)
    for apart in _clusters(boxes):
        masks = _masks([boxes[number] for number in apart])
        for number, mask in zip(apart, masks, strict=True):
            near = [n for n, other in zip(apart, masks, strict=True) if mask & other]
            pairs[number] = mask, near
    return pairs


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
    repeated = 0
    for row in rows:
        repeated |= mask << row * width
    return repeated
