"""Abstract programs, whose instructions only have regions, which is all that scheduling uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tpcompile.vm.program import Box, Buffer, Instruction, Join, Program, Region, Role, overlap
from tpcompile.vm.proof.counters import assign_counters
from tpcompile.vm.proof.dependencies import dependencies
from tpcompile.vm.proof.waiting import Groups

MANY = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

KEPT = Role.HISTORY
"""The role of buffers that instructions may read before they write them, unlike scratch memory."""

_SEEDS = st.integers(0, 2**64 - 1)
"""Seeds of whole programs; drawing each number separately is ten times slower than the checks."""


@dataclass(frozen=True)
class Touch:
    """Instruction that only declares regions."""

    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    label: str = "touch"
    name: ClassVar[str] = "touch"
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
    """Return a program with the counters that its dependencies require."""
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


def steps(most: int = 12, ranks: int = 1) -> st.SearchStrategy[Any]:
    """Draw buffers and instructions with any regions, including blocks of one or two heads."""
    return _SEEDS.map(lambda seed: _steps(Random(seed), most, ranks))


def _steps(dice: Random, most: int, ranks: int) -> tuple[tuple[Buffer, ...], tuple[Touch, ...]]:
    shapes = dice.choices([(4,), (2, 3), (1,)], k=dice.randint(1, 3))
    buffers = tuple(Buffer(f"b{number}", shape, role=KEPT) for number, shape in enumerate(shapes))

    def some(least: int = 0) -> tuple[Region, ...]:
        numbers = dice.choices(range(len(buffers)), k=dice.randint(least, 2))
        return tuple(Region(number, _box(dice, shapes[number])) for number in numbers)

    accesses: list[tuple[Any, Any, tuple[Join, ...]]] = []
    count = dice.randint(1, most)
    while len(accesses) < count:
        if dice.randint(0, 3):
            accesses.append((some(), some(), ()))
            continue
        regions = some(least=1)
        if len(regions) > 1 and meet(*regions):
            regions = regions[:1]
        blocks = [block for region in regions for block in _blocks_of(dice, region)]
        for block in dice.sample(blocks, len(blocks)):
            reads = tuple(r for r in some() if not any(meet(r, other) for other in regions))
            accesses.append((reads, (), (block,)))
    return buffers, tuple(
        Touch(reads, writes, f"touch {number}", dice.randint(0, ranks - 1), joins)
        for number, (reads, writes, joins) in enumerate(accesses)
    )


def _box(dice: Random, shape: tuple[int, ...]) -> Box:
    starts = [dice.randint(0, extent - 1) for extent in shape]
    return tuple(
        (start, dice.randint(start + 1, extent))
        for start, extent in zip(starts, shape, strict=True)
    )


def _blocks_of(dice: Random, region: Region) -> list[Join]:
    """Return the blocks of one head."""
    count = dice.randint(1, 3)
    whole = 2 * count
    return [Join(region, (2 * place, 2 * place + 2), whole, count) for place in range(count)]


def meet(region: Region, other: Region) -> bool:
    """Return whether two regions have elements in common."""
    return region.buffer == other.buffer and overlap(region.box, other.box)


def programs(
    most: int = 12, ranks: int = 2, repeats: bool | None = None
) -> st.SearchStrategy[Program]:
    """Draw a program with any regions and workers, and queues in any legal order."""
    return _SEEDS.map(lambda seed: _program(Random(seed), most, ranks, repeats))


def _program(dice: Random, most: int, ranks: int, repeats: bool | None) -> Program:
    ranks = dice.randint(1, ranks)
    buffers, instructions = _steps(dice, most, ranks)
    ranks_of = [instruction.rank for instruction in instructions]
    queues = _queues_for(dice, dependencies(instructions), ranks_of, ranks)
    sharing = dice.choice([1, 1, 2])
    again = dice.random() < 0.5 if repeats is None else repeats
    return program_of(buffers, instructions, queues, ranks, sharing, again)


def _queues_for(
    dice: Random, groups: Groups, ranks_of: Sequence[int], ranks: int
) -> tuple[tuple[int, ...], ...]:
    workers = dice.randint(1, 3)
    queues: list[list[int]] = [[] for _ in range(workers * ranks)]
    left = set(range(len(groups)))
    while left:
        free = sorted(
            n for n in left if not any(e in left for group in groups[n] for e in group.members)
        )
        number = dice.choice(free)
        left.discard(number)
        queues[ranks_of[number] * workers + dice.randint(0, workers - 1)].append(number)
    return tuple(map(tuple, queues))


def layered(layers: int, ranks: int, blocks: int) -> tuple[tuple[Buffer, ...], tuple[Touch, ...]]:
    """Return network layers: blocks of rows on each rank, with a sum across ranks between layers.

    Layers reuse the buffers, so that all kinds of dependencies occur.
    """
    names = ("x", "y", "h", "terms")
    roles = {"x": KEPT}
    buffers = tuple(
        Buffer(name, (blocks,), rank=rank, role=roles.get(name, Role.SCRATCH))
        for name in names
        for rank in range(ranks)
    )

    def whole(name: str, rank: int) -> Region:
        return Region(names.index(name) * ranks + rank, ((0, blocks),))

    def row(name: str, rank: int, block: int) -> Region:
        return Region(names.index(name) * ranks + rank, ((block, block + 1),))

    places = [(rank, block) for rank in range(ranks) for block in range(blocks)]
    touches: list[Touch] = []
    for layer in range(layers):
        x, y = ("x", "y") if layer % 2 == 0 else ("y", "x")
        touches += [Touch((whole(x, r),), (row("h", r, b),), f"up {layer}", r) for r, b in places]
        touches += [
            Touch((whole("h", r),), (row("terms", r, b),), f"down {layer}", r) for r, b in places
        ]
        for rank, block in places:
            terms = tuple(row("terms", other, block) for other in range(ranks))
            reads = (*terms, row(x, rank, block))
            touches.append(Touch(reads, (row(y, rank, block),), f"sum {layer}", rank))
    return buffers, tuple(touches)
