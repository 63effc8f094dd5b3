"""Wrong regions: the schedule assumes smaller regions or other buffers than the real ones.

The oracle and the verifier judge by the real regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

from tests.vm.mutants.bases import Base, Described, described
from tests.vm.mutants.orders import Made
from tests.vm.mutations import changed
from tpcompile.vm.program import Box, Instruction, Program, Region

Places = Sequence[tuple[int, Region]]


def read_forgotten(base: Base, dice: Random) -> Made:
    """Hide a read from the scheduler."""
    number, region = dice.choice(list(_reads(base)))
    return _seen_as(base, number, region, None)


def write_forgotten(base: Base, dice: Random) -> Made:
    """Hide a write from the scheduler."""
    number, region = dice.choice(list(_writes(base)))
    return _seen_as(base, number, region, None)


def region_shrunk(base: Base, dice: Random) -> Made:
    """Show the scheduler a region that is smaller by one or by half, at either end."""
    return _resized(base, dice, _shrunk)


def region_shifted(base: Base, dice: Random) -> Made:
    """Show the scheduler a region shifted by one, or by its length."""
    return _resized(base, dice, _shifted)


def _resized(
    base: Base, dice: Random, change: Callable[[Random, tuple[int, int]], tuple[int, int]]
) -> Made:
    wide = []
    for number, region in (*_reads(base), *_writes(base)):
        for dim, (start, stop) in enumerate(region.box):
            if stop - start > 1:
                wide.append((number, region, dim))
    number, region, dim = dice.choice(wide)
    box = _with_interval(region.box, dim, change(dice, region.box[dim]))
    extent = base.program.buffers[region.buffer].shape[dim]
    if not 0 <= box[dim][0] < box[dim][1] <= extent:
        return None
    return _seen_as(base, number, region, Region(region.buffer, box))


def _shrunk(dice: Random, interval: tuple[int, int]) -> tuple[int, int]:
    start, stop = interval
    less = dice.choice([1, max(1, (stop - start) // 2)])
    return dice.choice([(start + less, stop), (start, stop - less)])


def _shifted(dice: Random, interval: tuple[int, int]) -> tuple[int, int]:
    start, stop = interval
    offset = dice.choice([-1, 1]) * dice.choice([1, stop - start])
    return start + offset, stop + offset


def _with_interval(box: Box, dim: int, interval: tuple[int, int]) -> Box:
    new: Box = changed(box, dim, interval)
    return new


def _seen_as(base: Base, number: int, region: Region, new: Region | None) -> Made:
    def seen(accesses: tuple[Region, ...]) -> tuple[Region, ...]:
        other = tuple(new if access == region else access for access in accesses)
        return tuple(access for access in other if access is not None)

    true = base.steps[number]
    as_seen = replace(described(true), reads=seen(true.reads), writes=seen(true.writes))
    description = f"{true.label}: {region} is seen as {new}"
    return description, base.scheduled_as(changed(base.steps, number, as_seen))


def _reads(base: Base) -> Iterator[tuple[int, Region]]:
    """Yield reads of buffers that some instruction writes; other reads need no wait."""
    written = {region.buffer for step in base.steps for region in step.writes}
    written |= {join.region.buffer for step in base.steps for join in step.joins}
    for number, step in enumerate(base.steps):
        yield from ((number, region) for region in step.reads if region.buffer in written)


def _writes(base: Base) -> Iterator[tuple[int, Region]]:
    for number, step in enumerate(base.steps):
        yield from ((number, region) for region in step.writes)


def buffer_reused(base: Base, dice: Random) -> Made:
    """Merge two buffers, such as x0 and x1, but schedule for two."""
    moved, description = _buffers_in_one(base, dice)
    return description, replace(base.program, instructions=with_buffers(base, moved))


def buffer_reused_openly(base: Base, dice: Random) -> Made:
    """Merge two buffers and schedule for it, which is safe unless heads share the buffer."""
    moved, description = _buffers_in_one(base, dice)
    instructions = with_buffers(base, moved)
    program = base.scheduled_as(instructions)
    return f"{description}, and the schedule knows", replace(program, instructions=instructions)


def _buffers_in_one(base: Base, dice: Random) -> tuple[dict[int, int], str]:
    buffers, ranks = base.program.buffers, base.program.ranks
    alike: dict[object, list[int]] = {}
    for number in range(0, len(buffers), ranks):
        if buffers[number].role.kind == "scratch":
            key = tuple((b.shape, b.dtype) for b in buffers[number : number + ranks])
            alike.setdefault(key, []).append(number)
    old, new = dice.sample(dice.choice([same for same in alike.values() if len(same) > 1]), 2)
    description = f"{buffers[old].name} lies in {buffers[new].name}"
    return {old + rank: new + rank for rank in range(ranks)}, description


def with_buffers(base: Base, moved: dict[int, int]) -> tuple[Instruction, ...]:
    """Return instructions that use other buffers, also when they run."""

    def there(regions: Sequence[Region]) -> tuple[Region, ...]:
        return tuple(Region(moved.get(r.buffer, r.buffer), r.box) for r in regions)

    return tuple(
        Described(
            step,
            there(step.reads),
            there(step.writes),
            tuple(join._replace(region=there([join.region])[0]) for join in step.joins),
            tuple(moved.items()),
        )
        for step in base.steps
    )


def part_reused(base: Base, dice: Random) -> Made:
    """Merge two parts of a buffer, such as partials of two spans, but schedule for two."""
    written = {region for _, region in _writes(base)}
    alike: dict[object, list[Region]] = {}
    for region in sorted(written):
        if base.program.buffers[region.buffer].role.kind == "scratch":
            lengths = tuple(stop - start for start, stop in region.box)
            alike.setdefault((region.buffer, lengths), []).append(region)
    several = [same for same in alike.values() if len(same) > 1]
    if not several:
        return None
    old, new = dice.sample(dice.choice(several), 2)
    return f"{old} is {new}", _with_parts(base, old, new)


def _with_parts(base: Base, old: Region, new: Region) -> Program:
    """Redirect writes from one part to the other; readers are unchanged."""

    def there(regions: tuple[Region, ...]) -> tuple[Region, ...]:
        return tuple(new if region == old else region for region in regions)

    instructions = [
        replace(described(step), reads=there(step.reads), writes=there(step.writes))
        for step in base.steps
    ]
    return replace(base.program, instructions=tuple(instructions))


REGIONS = (
    read_forgotten,
    write_forgotten,
    region_shrunk,
    region_shifted,
    buffer_reused,
    buffer_reused_openly,
    part_reused,
)
