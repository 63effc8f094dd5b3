"""What must be done before each instruction, derived from what they touch.

Read after write, write after read, write after write: for each part of a buffer the last who
wrote it and those who have read it since. Groups of instructions are shared, because all who
read one value wait for the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import networkx as nx

from tpcompile.vm.program import Instruction
from tpcompile.vm.region import Box, Buffer, overlap

Group = tuple[int, ...]
"""Instructions that are waited for together, in rising order."""


@dataclass
class _Part:
    """One part of a buffer: its last writer, who has read it since, and what was written over."""

    writer: int | None = None
    readers: dict[Box, list[int]] = field(default_factory=dict)
    """By what they read, which may be less than the part, or more."""
    covered: dict[Box, int] = field(default_factory=dict)
    """Later writes that do not overlap each other, and how many elements each took away."""


class _Parts:
    """The parts of one buffer as they were last written or read."""

    def __init__(self) -> None:
        self._parts: dict[Box, _Part] = {}
        self._near: dict[Box, list[Box]] = {}
        self._asked: dict[Box, Group] = {}

    def read(self, box: Box, number: int) -> Group:
        """The last writers of what `box` overlaps; `number` is a reader from now on."""
        near = self._overlapping(box)
        if box not in self._asked:
            writers = (self._parts[other].writer for other in near)
            self._asked[box] = _group(writer for writer in writers if writer is not None)
        if box not in self._parts:
            self._parts[box] = _Part(readers=self._readers_of(near, box))
        for other in self._overlapping(box):
            self._parts[other].readers.setdefault(box, []).append(number)
        return self._asked[box]

    def write(self, box: Box, number: int) -> Group:
        """Readers and writers of what `box` overlaps; `number` has written it from now on.

        Whoever read a part around `box` is among the readers of `box` too, if that was known by
        then; if not, its first writer has waited for them.
        """
        known = box in self._parts
        before: list[int] = []
        for other in self._overlapping(box):
            part = self._parts[other]
            if known and part.writer is None and other != box:
                continue
            readers = [r for read, who in part.readers.items() if overlap(read, box) for r in who]
            if readers:
                before += readers
            elif part.writer is not None:  # or the readers have waited for it
                before.append(part.writer)
        self._parts[box] = _Part(number)
        for other in self._overlapping(box):
            self._asked.pop(other, None)
            if other != box:
                self._cover(other, box)
        return _group(before)

    def _readers_of(self, parts: Iterable[Box], box: Box) -> dict[Box, list[int]]:
        found: dict[Box, list[int]] = {}
        for part in parts:
            for read, who in self._parts[part].readers.items():
                if overlap(read, box):
                    found[read] = sorted({*found.get(read, []), *who})
        return found

    def _cover(self, part: Box, by: Box) -> None:
        """Forget a part once all of it has been written over."""
        covered = self._parts[part].covered
        if by in covered or any(overlap(by, other) for other in covered):
            return
        covered[by] = _volume(_common(part, by))
        if sum(covered.values()) == _volume(part):
            del self._parts[part]

    def _overlapping(self, box: Box) -> list[Box]:
        if box not in self._near:
            self._near[box] = [other for other in self._near if overlap(box, other)] + [box]
            for other in self._near[box][:-1]:
                self._near[other].append(box)
        return [other for other in self._near[box] if other in self._parts]


def _common(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _group(numbers: Iterable[int]) -> Group:
    return tuple(sorted(set(numbers)))


def dependencies(
    buffers: Sequence[Buffer], instructions: Sequence[Instruction]
) -> list[tuple[Group, ...]]:
    """For each instruction the groups that must be done before it starts."""
    parts = [_Parts() for _ in buffers]
    shared: dict[Group, Group] = {}
    found: list[tuple[Group, ...]] = []
    for number, instruction in enumerate(instructions):
        groups = [parts[r.buffer].read(r.box, number) for r in instruction.reads]
        groups += [parts[r.buffer].write(r.box, number) for r in instruction.writes]
        own = (tuple(n for n in group if n != number) for group in groups)
        found.append(tuple(dict.fromkeys(shared.setdefault(g, g) for g in own if g)))
    return found


def graph_of(groups: Sequence[tuple[Group, ...]]) -> nx.DiGraph:
    """The same as a graph, with an edge from each instruction to those that wait for it."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(groups)))
    for number, own in enumerate(groups):
        graph.add_edges_from((early, number) for group in own for early in group)
    return graph
