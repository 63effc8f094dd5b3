"""Conflicts: accesses whose order matters. Proofs and oracles share this definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from tpcompile.vm.program import Instruction, Join, Program, Region, overlap


@dataclass
class Head:
    """The blocks that make up one head, each with the number of its instruction."""

    region: Region
    blocks: list[tuple[int, Join]] = field(default_factory=list)


@dataclass(frozen=True)
class Heads:
    """The heads that a program computes in blocks."""

    all: tuple[Head, ...]
    by_instruction: tuple[tuple[int, ...], ...]
    """For each instruction, the numbers of the heads that its joins belong to."""


def heads_of(instructions: Sequence[Instruction]) -> Heads:
    """Collect the heads that the instructions compute.

    Blocks of the same region belong to one head, until it is complete or anything else accesses it.
    """
    heads: list[Head] = []
    by_instruction: list[tuple[int, ...]] = []
    unfinished: dict[int, dict[Region, int]] = {}
    """By buffer, the heads that still lack blocks."""
    for number, instruction in enumerate(instructions):
        head_numbers: list[int] = []
        if unfinished:
            for region in (*instruction.reads, *instruction.writes):
                _close(unfinished, region)
        for join in instruction.joins:
            if join.region not in unfinished.get(join.region.buffer, {}):
                _close(unfinished, join.region)
                unfinished.setdefault(join.region.buffer, {})[join.region] = len(heads)
                heads.append(Head(join.region))
            head = unfinished[join.region.buffer][join.region]
            heads[head].blocks.append((number, join))
            if len(heads[head].blocks) == heads[head].blocks[0][1].arrivals:
                _close(unfinished, join.region)
            head_numbers.append(head)
        by_instruction.append(tuple(head_numbers))
    return Heads(tuple(heads), tuple(by_instruction))


def _close(unfinished: dict[int, dict[Region, int]], region: Region) -> None:
    waiting = unfinished.get(region.buffer)
    if waiting is None:
        return
    for other in [other for other in waiting if overlap(other.box, region.box)]:
        del waiting[other]
    if not waiting:
        del unfinished[region.buffer]


def conflict(
    program: Program, heads: Heads, number: int, other: int
) -> tuple[Region, Region] | None:
    """Return two overlapping regions that the instructions access, or None if they do not conflict.

    At least one of the regions is written. Blocks of the same head do not conflict. `heads` are the
    heads of the program.
    """
    first, second = program.instructions[number], program.instructions[other]
    first_changes = _changed(first, heads.by_instruction[number])
    second_changes = _changed(second, heads.by_instruction[other])
    pairs = [
        *product([region for region, _ in first_changes], second.reads),
        *product(first.reads, [region for region, _ in second_changes]),
        *(
            (a, b)
            for (a, head), (b, same) in product(first_changes, second_changes)
            if head is None or head != same
        ),
    ]
    return next(
        (p for p in pairs if p[0].buffer == p[1].buffer and overlap(p[0].box, p[1].box)), None
    )


def _changed(instruction: Instruction, heads: tuple[int, ...]) -> list[tuple[Region, int | None]]:
    """Return the regions that an instruction writes, and those that it joins, with their heads."""
    joined = zip(instruction.joins, heads, strict=True)
    return [(region, None) for region in instruction.writes] + [(j.region, h) for j, h in joined]
