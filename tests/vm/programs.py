"""Programs of abstract instructions: what they touch is all that scheduling looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tpcompile.vm.counters import assign_counters
from tpcompile.vm.dependencies import dependencies
from tpcompile.vm.program import Instruction, Program
from tpcompile.vm.region import Box, Buffer, Region


@dataclass(frozen=True)
class Touch:
    """Does nothing but touch."""

    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    label: str = "touch"


def program_of(
    buffers: tuple[Buffer, ...],
    instructions: tuple[Instruction, ...],
    queues: tuple[tuple[int, ...], ...],
) -> Program:
    """With the counters that its dependencies ask for."""
    ordering = assign_counters(dependencies(buffers, instructions), queues)
    return Program(buffers, instructions, queues, ordering.waits, ordering.signals)


@st.composite
def boxes(draw: Any, shape: tuple[int, ...]) -> Box:
    box = []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        box.append((start, draw(st.integers(start + 1, extent))))
    return tuple(box)


@st.composite
def programs(draw: Any, most: int = 12) -> Program:
    """Any regions, any assignment to workers, queues in any order that dependencies allow."""
    shapes = draw(st.lists(st.sampled_from([(4,), (2, 3), (1,)]), min_size=1, max_size=3))
    buffers = tuple(Buffer(f"b{number}", shape) for number, shape in enumerate(shapes))
    touched = st.integers(0, len(buffers) - 1).flatmap(
        lambda number: boxes(shapes[number]).map(lambda box: Region(number, box))
    )
    count = draw(st.integers(1, most))
    instructions = tuple(
        Touch(
            tuple(draw(st.lists(touched, max_size=2))),
            tuple(draw(st.lists(touched, max_size=2))),
            f"touch {number}",
        )
        for number in range(count)
    )
    queues = draw(queues_for(dependencies(buffers, instructions)))
    return program_of(buffers, instructions, queues)


@st.composite
def queues_for(draw: Any, groups: list[tuple[tuple[int, ...], ...]]) -> tuple[tuple[int, ...], ...]:
    workers = draw(st.integers(1, 4))
    queues: list[list[int]] = [[] for _ in range(workers)]
    left = set(range(len(groups)))
    while left:
        free = sorted(
            n for n in left if not any(early in left for group in groups[n] for early in group)
        )
        number = draw(st.sampled_from(free))
        left.discard(number)
        queues[draw(st.integers(0, workers - 1))].append(number)
    return tuple(map(tuple, queues))
