"""Programs of abstract instructions: what they touch is all that scheduling looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tpcompile.vm.counters import assign_counters
from tpcompile.vm.dependencies import dependencies
from tpcompile.vm.program import Instruction, Program
from tpcompile.vm.region import Box, Buffer, Join, Region, overlap
from tpcompile.vm.waiting import Groups

MANY = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@dataclass(frozen=True)
class Touch:
    """Does nothing but touch."""

    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    label: str = "touch"
    rank: int = 0
    joins: tuple[Join, ...] = ()


def program_of(
    buffers: tuple[Buffer, ...],
    instructions: tuple[Instruction, ...],
    queues: tuple[tuple[int, ...], ...],
    ranks: int = 1,
    sharing: int = 1,
    repeats: bool = False,
) -> Program:
    """With the counters that its dependencies ask for."""
    ordering = assign_counters(dependencies(instructions), queues, sharing, repeats)
    waits, signals = ordering.waits, ordering.signals
    return Program(buffers, instructions, queues, waits, signals, ranks, sharing, repeats)


@st.composite
def boxes(draw: Any, shape: tuple[int, ...]) -> Box:
    box = []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        box.append((start, draw(st.integers(start + 1, extent))))
    return tuple(box)


@st.composite
def steps(draw: Any, most: int = 12, ranks: int = 1) -> tuple[Any, Any]:
    """Buffers, and instructions with any regions; blocks of one or two heads among them."""
    shapes = draw(st.lists(st.sampled_from([(4,), (2, 3), (1,)]), min_size=1, max_size=3))
    buffers = tuple(Buffer(f"b{number}", shape) for number, shape in enumerate(shapes))
    touched = st.integers(0, len(buffers) - 1).flatmap(
        lambda number: boxes(shapes[number]).map(lambda box: Region(number, box))
    )
    some = st.lists(touched, max_size=2).map(tuple)
    found: list[tuple[Any, Any, tuple[Join, ...]]] = []
    count = draw(st.integers(1, most))
    while len(found) < count:
        if draw(st.integers(0, 3)):
            found.append((draw(some), draw(some), ()))
            continue
        regions = draw(st.lists(touched, min_size=1, max_size=2))
        if len(regions) > 1 and _meet(*regions):
            regions = regions[:1]
        blocks = [block for region in regions for block in draw(blocks_of(region))]
        for block in draw(st.permutations(blocks)):
            reads = tuple(r for r in draw(some) if not any(_meet(r, other) for other in regions))
            found.append((reads, (), (block,)))
    return buffers, tuple(
        Touch(reads, writes, f"touch {number}", draw(st.integers(0, ranks - 1)), joins)
        for number, (reads, writes, joins) in enumerate(found)
    )


@st.composite
def blocks_of(draw: Any, region: Region) -> list[Join]:
    """The blocks of one head."""
    count = draw(st.integers(1, 3))
    whole = 2 * count
    return [Join(region, (2 * place, 2 * place + 2), whole, count) for place in range(count)]


def _meet(one: Region, other: Region) -> bool:
    return one.buffer == other.buffer and overlap(one.box, other.box)


@st.composite
def programs(draw: Any, most: int = 12, ranks: int = 2, repeats: bool | None = None) -> Program:
    """Any regions, any assignment to workers, queues in any order that dependencies allow."""
    ranks = draw(st.integers(1, ranks))
    buffers, instructions = draw(steps(most, ranks))
    ranks_of = [instruction.rank for instruction in instructions]
    queues = draw(queues_for(dependencies(instructions), ranks_of, ranks))
    sharing = draw(st.sampled_from([1, 1, 2]))
    again = draw(st.booleans()) if repeats is None else repeats
    return program_of(buffers, instructions, queues, ranks, sharing, again)


@st.composite
def queues_for(
    draw: Any, groups: Groups, ranks_of: Sequence[int], ranks: int
) -> tuple[tuple[int, ...], ...]:
    workers = draw(st.integers(1, 3))
    queues: list[list[int]] = [[] for _ in range(workers * ranks)]
    left = set(range(len(groups)))
    while left:
        free = sorted(
            n for n in left if not any(e in left for group in groups[n] for e in group.members)
        )
        number = draw(st.sampled_from(free))
        left.discard(number)
        queues[ranks_of[number] * workers + draw(st.integers(0, workers - 1))].append(number)
    return tuple(map(tuple, queues))


def layered(layers: int, ranks: int, blocks: int) -> tuple[tuple[Buffer, ...], tuple[Touch, ...]]:
    """Layers of a network: on each rank blocks of rows, a sum over ranks between them.

    The buffers are used again in every layer, so that all kinds of order are needed.
    """
    names = ("x", "y", "h", "terms")
    buffers = tuple(Buffer(f"{name}", (blocks,), rank=r) for name in names for r in range(ranks))

    def whole(name: str, rank: int) -> Region:
        return Region(names.index(name) * ranks + rank, ((0, blocks),))

    def row(name: str, rank: int, block: int) -> Region:
        return Region(names.index(name) * ranks + rank, ((block, block + 1),))

    places = [(rank, block) for rank in range(ranks) for block in range(blocks)]
    found: list[Touch] = []
    for layer in range(layers):
        x, y = ("x", "y") if layer % 2 == 0 else ("y", "x")
        found += [Touch((whole(x, r),), (row("h", r, b),), f"up {layer}", r) for r, b in places]
        found += [
            Touch((whole("h", r),), (row("terms", r, b),), f"down {layer}", r) for r, b in places
        ]
        for rank, block in places:
            terms = tuple(row("terms", other, block) for other in range(ranks))
            reads = (*terms, row(x, rank, block))
            found.append(Touch(reads, (row(y, rank, block),), f"sum {layer}", rank))
    return buffers, tuple(found)
