"""The verifier: a proof that every legal execution of a program gives its sequential results.

It checks that every instruction is in exactly one queue of its rank, that the program cannot
deadlock, that the blocks of each head cover it, and that a queue or counters order every two
conflicting instructions, within one step and across steps.

If workers share queues, the proof holds for any number of workers per queue, not only for
`sharing`. The order of a shared queue then proves progress (a single worker can run the whole
queue), but it never orders two instructions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpcompile.errors import VerifyError
from tpcompile.pause import paused_collector
from tpcompile.vm.program import Instruction, Program, Region
from tpcompile.vm.program.operands import disagreements
from tpcompile.vm.program.region import box_text, fits, refusal
from tpcompile.vm.proof.conflict import Heads, conflict, heads_of
from tpcompile.vm.proof.done import Done
from tpcompile.vm.proof.earlier import Earlier
from tpcompile.vm.proof.execution import run_order
from tpcompile.vm.proof.known import Known, Several, missing, with_one
from tpcompile.vm.proof.overlap import steps_may_overlap

_LOOSE = (
    "no counter makes it wait, and a shared queue does not order its instructions, because a "
    "program must be valid for any number of workers per queue"
)


@dataclass(frozen=True)
class Fault:
    """A violated rule, with a description of how the program violates it."""

    rule: str
    said: str
    count: int = 1
    """The number of faults that this one stands for."""


MOST_LISTED = 100
"""The maximum number of faults that are listed individually."""


def verify_program(program: Program) -> None:
    """Raise `VerifyError` if the program has any fault."""
    refuse(check_program(program))


def refuse(faults: Sequence[Fault]) -> None:
    """Raise `VerifyError` with the first of the faults and their number, if there are any."""
    if faults:
        count = sum(fault.count for fault in faults)
        more = f" ({count} faults in all)" if count > 1 else ""
        raise VerifyError(
            f"The program is not valid: it violates the rule {faults[0].rule!r}{more}",
            got=f"that {faults[0].said}",
        )


@paused_collector()
def check_program(program: Program) -> list[Fault]:
    """Return all faults of a program, at most `MOST_LISTED` of them individually.

    Checks that rely on a broken part of the program are skipped.
    """
    faults = _faults(program)
    more = len(faults) - MOST_LISTED
    if more > 0:
        faults[MOST_LISTED:] = [Fault("more", f"{more} more faults are not listed", more)]
    return faults


def _faults(program: Program) -> list[Fault]:
    faults = list(_check_queues(program)) or list(_check_counters(program))
    if faults:
        return faults
    foreign: list[Fault] = []
    for found in disagreements(program):
        wrong = found.wrong
        said = f"in {_name(program, found.number)}, {wrong.said}"
        (foreign if wrong.rule == "rank" else faults).append(Fault(wrong.rule, said))
    return foreign + (faults or list(_check_regions(program)) or _order_faults(program))


def _order_faults(program: Program) -> list[Fault]:
    """Return the faults in heads, thresholds, progress and order; all regions must be correct."""
    heads = heads_of(program.instructions)
    faults = list(_check_heads(program, heads)) + list(_check_thresholds(program))
    if faults:
        return faults
    order = list(run_order(program))
    if len(order) < len(program.instructions):
        return [_deadlock(program, order)]
    return list(_check_order(program, heads, order))


def _check_queues(program: Program) -> Iterator[Fault]:
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
    seen = [0] * count
    each = len(program.queues) // program.ranks
    for place, queue in enumerate(program.queues):
        for number in queue:
            if not 0 <= number < count:
                yield Fault(
                    "queue",
                    f"queue {place} contains instruction {number}, but the program has {count} "
                    "instructions, numbered from 0",
                )
                continue
            seen[number] += 1
            rank = program.instructions[number].rank
            if rank != place // each:
                yield Fault(
                    "rank",
                    f"{_name(program, number)} belongs to rank {rank} but is in queue {place}, "
                    f"which belongs to rank {place // each}",
                )
    for number, times in enumerate(seen):
        if times != 1:
            yield Fault(
                "queue",
                f"{_name(program, number)} occurs {times} times in the queues; it must occur "
                "exactly once",
            )


def _check_counters(program: Program) -> Iterator[Fault]:
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


def _check_regions(program: Program) -> Iterator[Fault]:
    shapes = [buffer.shape for buffer in program.buffers]
    good: set[Region] = set()
    for number, instruction in enumerate(program.instructions):
        for region in (*instruction.reads, *instruction.writes, *_joined(instruction)):
            if region in good:
                continue
            buffer, box = region
            if not 0 <= buffer < len(shapes):
                yield Fault(
                    "bounds",
                    f"{_name(program, number)} accesses buffer {buffer}, but the program has "
                    f"{len(shapes)} buffers, numbered from 0",
                )
            elif not fits(box, shapes[buffer]):
                name, wrong = program.buffers[buffer].name, refusal(box, shapes[buffer])
                yield Fault(
                    "bounds",
                    f"{_name(program, number)} accesses a region outside of {name}: {wrong}",
                )
            else:
                good.add(region)


def _joined(instruction: Instruction) -> list[Region]:
    return [join.region for join in instruction.joins]


def _check_heads(program: Program, heads: Heads) -> Iterator[Fault]:
    """Check that the blocks of a head compute each row once, and that the last one finishes it."""
    for head in heads.all:
        (first, join), count = head.blocks[0], len(head.blocks)
        where = program.buffers[head.region.buffer].name + box_text(head.region.box)
        end = 0
        for start, stop in sorted(block.part for _, block in head.blocks):
            if start != end or stop <= start:
                said = "twice" if start < end else "by no block"
                rows = f"{min(start, end)} to {max(start, end)}"
                yield Fault(
                    "heads",
                    f"rows {rows} of the head {where} are computed {said}; every row must be "
                    "computed exactly once",
                )
            end = max(end, stop)
        for number, block in head.blocks:
            if block.finish != join.finish:
                yield Fault(
                    "heads",
                    f"{_name(program, number)} and {_name(program, first)} finish the head {where} "
                    "with different operands, but either block can be the last to arrive",
                )
            if (block.whole, block.arrivals) != (join.whole, count):
                yield Fault(
                    "heads",
                    f"{_name(program, number)} gives the head {where} {block.whole} rows and an "
                    f"arrival count of {block.arrivals}; these must be {join.whole} rows, as in "
                    f"its first block, {_name(program, first)}, and an arrival count of {count}, "
                    "the number of blocks that arrive before any other access to the head",
                )
        if end != join.whole:
            yield Fault(
                "heads", f"the head {where} has {join.whole} rows, but its blocks end at row {end}"
            )


def _check_thresholds(program: Program) -> Iterator[Fault]:
    raised = [0] * program.counters
    for number, own in enumerate(program.signals):
        for counter in own:
            if counter < 0:
                yield Fault(
                    "counter",
                    f"{_name(program, number)} signals counter {counter}; counters are numbered "
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
                    f"{_name(program, number)} waits for counter {wait.counter}; counters are "
                    "numbered from 0",
                )
            elif not -early * raised[wait.counter] <= wait.until <= raised[wait.counter]:
                yield Fault(
                    "threshold",
                    f"{_name(program, number)} waits for {wait.until} signals of counter "
                    f"{wait.counter}, which gets {raised[wait.counter]}; the threshold must be "
                    f"from {-early * raised[wait.counter]} to {raised[wait.counter]}",
                )


def _deadlock(program: Program, order: list[int]) -> Fault:
    ran = set(order)
    stuck = [next((n for n in queue if n not in ran), None) for queue in program.queues]
    first = next(number for number in stuck if number is not None)
    waits_for = ", ".join(f"counter {w.counter} ≥ {w.until}" for w in program.waits[first])
    return Fault(
        "deadlock",
        f"{len(program.instructions) - len(order)} instructions never run; "
        f"{_name(program, first)}, the first of them in its queue, waits for {waits_for}",
    )


def _check_order(program: Program, heads: Heads, order: list[int]) -> Iterator[Fault]:
    """Check that conflicting instructions are ordered, within one step and across steps."""
    earlier = Earlier(program, heads)
    done = Done(program, order)
    for number, known in done.walk():
        early = _missing(earlier.of[number], with_one(known, number))
        if early is not None:
            yield Fault("order", _unordered(program, heads, early, number))
    if program.repeats:
        unguarded = list(done.unguarded())
        if unguarded and steps_may_overlap(program):
            return
        for number in unguarded:
            yield Fault(
                "steps",
                f"{_name(program, number)} can start before the previous step is complete: neither "
                "it nor any instruction that must run before it waits for the end of that step",
            )


def _missing(earlier: list[Several], known: Known) -> int | None:
    """Return the last instruction of these sets that is not known to be complete, or None."""
    found: int | None = None
    for some in earlier:
        if some[1] >= known[0]:
            number = missing(some, known)
            if number is not None:
                found = number if found is None else max(found, number)
    return found


def _unordered(program: Program, heads: Heads, early: int, late: int) -> str:
    found = conflict(program, heads, early, late)
    assert found is not None
    first, second = found
    did, does = _verb(program, early, first), _verb(program, late, second)
    buffer = program.buffers[first.buffer].name
    return (
        f"{_name(program, early)} {did} {buffer}{box_text(first.box)} and "
        f"{_name(program, late)} {does} {buffer}{box_text(second.box)}; the second can run first: "
        f"{_LOOSE if program.sharing > 1 else 'neither a queue nor a counter makes it wait'}"
    )


def _verb(program: Program, number: int, region: Region) -> str:
    instruction = program.instructions[number]
    if region in instruction.writes:
        return "writes"
    return "writes a block of" if region in _joined(instruction) else "reads"


def _name(program: Program, number: int) -> str:
    return f"{program.instructions[number].label} (instruction {number})"
