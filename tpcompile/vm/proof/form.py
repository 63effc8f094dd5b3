"""Checks of a program's form: its queues, counters, regions and heads, each separately.

The order of instructions is checked only if the form is correct.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tpcompile.vm.program import Box, Program, Region
from tpcompile.vm.program.buffer import wrong_buffers
from tpcompile.vm.program.program import touched
from tpcompile.vm.program.region import all_fit, box_text, refusal
from tpcompile.vm.proof.conflict import Heads
from tpcompile.vm.proof.fault import Fault, cited


def check_queues(program: Program) -> Iterator[Fault]:
    count = len(program.instructions)
    if not len(program.waits) == len(program.signals) == count:
        waits, signals = len(program.waits), len(program.signals)
        yield Fault(
            "shape",
            f"the program has {count} instructions, {waits} lists of waits and {signals} lists of "
            "signals; each instruction must have one list of each",
        )
        return
    if program.ranks < 1 or program.sharing < 1 or len(program.queues) % program.ranks:
        queues, ranks = len(program.queues), program.ranks
        yield Fault(
            "shape",
            f"the program has ranks={ranks}, sharing={program.sharing} and {queues} queues; ranks "
            "and sharing must be at least 1, and every rank must have the same number of queues",
        )
        return
    occurrences = [0] * count
    queues_per_rank = len(program.queues) // program.ranks
    for place, queue in enumerate(program.queues):
        for number in queue:
            if not 0 <= number < count:
                yield Fault(
                    "queue",
                    f"queue {place} contains instruction {number}, but the program has {count} "
                    "instructions, numbered from 0",
                )
                continue
            occurrences[number] += 1
            rank = program.instructions[number].rank
            if rank != place // queues_per_rank:
                yield Fault(
                    "rank",
                    f"{cited(program, number)} belongs to rank {rank} but is in queue {place}, "
                    f"which belongs to rank {place // queues_per_rank}",
                )
    for number, times in enumerate(occurrences):
        if times != 1:
            yield Fault(
                "queue",
                f"{cited(program, number)} occurs {times} times in the queues; it must occur "
                "exactly once",
            )


def check_counters(program: Program) -> Iterator[Fault]:
    """Refuse a program with more counters than waits and signals.

    Every counter takes memory, here and in every executor, even if no instruction uses it.
    """
    most = sum(map(len, program.waits)) + sum(map(len, program.signals))
    if program.counters > most:
        yield Fault(
            "counter",
            f"the program has {program.counters} counters, but only {most} waits and signals; "
            "counters must be numbered from 0 with no gaps",
        )


def check_buffers(program: Program) -> Iterator[Fault]:
    for wrong in wrong_buffers(program.buffers, program.ranks):
        yield Fault("buffer", f"the {wrong.subject} is {wrong.got}; it must be {wrong.expected}")


def check_regions(
    program: Program, boxes: Mapping[int, Sequence[Box]] | None = None
) -> Iterator[Fault]:
    """Check that all regions are parts of buffers.

    `boxes` are those that the program accesses, by buffer, if the caller has them.
    """
    shapes = [buffer.shape for buffer in program.buffers]
    boxes = _boxes(program) if boxes is None else boxes
    if all(0 <= n < len(shapes) and all_fit(part, shapes[n]) for n, part in boxes.items()):
        return
    for number, instruction in enumerate(program.instructions):
        for region in touched(instruction):
            if not _is_inside(region, shapes):
                yield Fault(
                    "bounds", f"{cited(program, number)} accesses {_outside(program, region)}"
                )


def _boxes(program: Program) -> dict[int, list[Box]]:
    """Return the boxes of each buffer that the program accesses."""
    boxes: dict[int, list[Box]] = {}
    for instruction in program.instructions:
        for buffer, box in touched(instruction):
            boxes.setdefault(buffer, []).append(box)
    return boxes


def _is_inside(region: Region, shapes: Sequence[tuple[int, ...]]) -> bool:
    buffer, box = region
    return 0 <= buffer < len(shapes) and not refusal(box, shapes[buffer])


def _outside(program: Program, region: Region) -> str:
    """Describe a region that is not part of a buffer."""
    buffer, box = region
    count = len(program.buffers)
    if not 0 <= buffer < count:
        return f"buffer {buffer}, but the program has {count} buffers, numbered from 0"
    name, shape = program.buffers[buffer].name, program.buffers[buffer].shape
    return f"a region outside of {name}: {refusal(box, shape)}"


def check_heads(program: Program, heads: Heads) -> Iterator[Fault]:
    """Check that the blocks of a head compute each row once, and that the last one finishes it."""
    for head in heads.all:
        (first, join), count = head.blocks[0], len(head.blocks)
        where = program.buffers[head.region.buffer].name + box_text(head.region.box)
        end = 0
        for start, stop in sorted(block.part for _, block in head.blocks):
            if start != end or stop <= start:
                mistake = "twice" if start < end else "by no block"
                rows = f"{min(start, end)} to {max(start, end)}"
                yield Fault(
                    "heads",
                    f"rows {rows} of the head {where} are computed {mistake}; every row must be "
                    "computed exactly once",
                )
            end = max(end, stop)
        for number, block in head.blocks:
            if block.finish != join.finish:
                yield Fault(
                    "heads",
                    f"{cited(program, number)} and {cited(program, first)} finish the head {where} "
                    "with different operands, but either block can be the last to arrive",
                )
            if (block.whole, block.arrivals) != (join.whole, count):
                yield Fault(
                    "heads",
                    f"{cited(program, number)} gives the head {where} {block.whole} rows and an "
                    f"arrival count of {block.arrivals}; these must be {join.whole} rows, as in "
                    f"its first block, {cited(program, first)}, and an arrival count of {count}, "
                    "the number of blocks that arrive before any other access to the head",
                )
        if end != join.whole:
            yield Fault(
                "heads", f"the head {where} has {join.whole} rows, but its blocks end at row {end}"
            )


def check_thresholds(program: Program) -> Iterator[Fault]:
    raised = [0] * program.counters
    for number, counters in enumerate(program.signals):
        for counter in counters:
            if counter < 0:
                yield Fault(
                    "counter",
                    f"{cited(program, number)} signals counter {counter}; counters are numbered "
                    "from 0",
                )
            else:
                raised[counter] += 1
    # a threshold of 0 or below means the signals of the previous step: all of them, or fewer
    early = 1 if program.repeats else 0
    for number, waits in enumerate(program.waits):
        for wait in waits:
            if wait.counter < 0:
                yield Fault(
                    "counter",
                    f"{cited(program, number)} waits for counter {wait.counter}; counters are "
                    "numbered from 0",
                )
            elif not -early * raised[wait.counter] <= wait.until <= raised[wait.counter]:
                yield Fault(
                    "threshold",
                    f"{cited(program, number)} waits for {wait.until} signals of counter "
                    f"{wait.counter}, which gets {raised[wait.counter]}; the threshold must be "
                    f"from {-early * raised[wait.counter]} to {raised[wait.counter]}",
                )
