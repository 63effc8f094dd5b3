"""Proves that a program means what its instructions mean one after the other, whoever is first.

Every instruction is in one queue of its rank, the program cannot deadlock, heads are made of all
their blocks, every two that conflict are ordered, by their queue or by counters, and so are steps.

If workers share queues, all this is proved for any number of workers at each queue, not only for
`sharing`: the order of a queue proves progress (a single worker gets through), never an order
between two instructions.
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
    "no counter makes it wait, and a queue that workers share orders nothing: a program must be "
    "right for any number of workers at a queue"
)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a program, in words."""

    rule: str
    said: str
    count: int = 1
    """How many faults it stands for."""


MOST_LISTED = 100
"""Faults that are listed one by one."""


def verify_program(program: Program) -> None:
    """Raise if anything is wrong."""
    refuse(check_program(program))


def refuse(faults: Sequence[Fault]) -> None:
    """Raise if there are any."""
    if faults:
        count = sum(fault.count for fault in faults)
        more = f" ({count} faults in all)" if count > 1 else ""
        raise VerifyError(f"The program is not valid: {faults[0].rule}{more}", got=faults[0].said)


@paused_collector()
def check_program(program: Program) -> list[Fault]:
    """Everything that is wrong; what rests on a broken part is not looked at."""
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
        said = f"{_name(program, found.number)}: {wrong.said}"
        (foreign if wrong.rule == "rank" else faults).append(Fault(wrong.rule, said))
    return foreign + (faults or list(_check_regions(program)) or _order_faults(program))


def _order_faults(program: Program) -> list[Fault]:
    """What is wrong with a program whose regions are true."""
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
        yield Fault("shape", f"{count} instructions, not so many waits and signals")
        return
    if program.ranks < 1 or program.sharing < 1 or len(program.queues) % program.ranks:
        queues, ranks = len(program.queues), program.ranks
        yield Fault("shape", f"{queues} queues of {program.sharing} workers for {ranks} ranks")
        return
    seen = [0] * count
    each = len(program.queues) // program.ranks
    for place, queue in enumerate(program.queues):
        for number in queue:
            if not 0 <= number < count:
                yield Fault("queue", f"queue {place} has {number}, which is no instruction")
                continue
            seen[number] += 1
            rank = program.instructions[number].rank
            if rank != place // each:
                yield Fault(
                    "rank",
                    f"{_name(program, number)} belongs to rank {rank} and is in queue {place}, "
                    f"which is one of rank {place // each}",
                )
    for number, times in enumerate(seen):
        if times != 1:
            yield Fault("queue", f"{_name(program, number)} is in the queues {times} times")


def _check_counters(program: Program) -> Iterator[Fault]:
    """A counter takes memory, here and in every executor, though nothing may mention it."""
    most = sum(map(len, program.waits)) + sum(map(len, program.signals))
    if program.counters > most:
        yield Fault("counter", f"{program.counters} counters for {most} waits and signals")


def _check_regions(program: Program) -> Iterator[Fault]:
    shapes = [buffer.shape for buffer in program.buffers]
    good: set[Region] = set()
    for number, instruction in enumerate(program.instructions):
        for region in (*instruction.reads, *instruction.writes, *_joined(instruction)):
            if region in good:
                continue
            buffer, box = region
            if not 0 <= buffer < len(shapes):
                yield Fault("bounds", f"{_name(program, number)} touches buffer {buffer}")
            elif not fits(box, shapes[buffer]):
                name, wrong = program.buffers[buffer].name, refusal(box, shapes[buffer])
                yield Fault("bounds", f"{_name(program, number)} touches {name}, {wrong}")
            else:
                good.add(region)


def _joined(instruction: Instruction) -> list[Region]:
    return [join.region for join in instruction.joins]


def _check_heads(program: Program, heads: Heads) -> Iterator[Fault]:
    """The parts of a head are all of it, each once, and it is finished when the last arrives."""
    for head in heads.all:
        (first, join), count = head.blocks[0], len(head.blocks)
        where = program.buffers[head.region.buffer].name + box_text(head.region.box)
        end = 0
        for start, stop in sorted(block.part for _, block in head.blocks):
            if start != end or stop <= start:
                said = "twice" if start < end else "by nobody"
                rows = f"{min(start, end)} to {max(start, end)}"
                yield Fault("heads", f"rows {rows} of the head {where} are computed {said}")
            end = max(end, stop)
        for number, block in head.blocks:
            if block.finish != join.finish:
                yield Fault(
                    "heads",
                    f"{_name(program, number)} and {_name(program, first)} finish the head {where} "
                    "by different operands; either can be last",
                )
            if (block.whole, block.arrivals) != (join.whole, count):
                yield Fault(
                    "heads",
                    f"{_name(program, number)} finishes the head {where} of {block.whole} rows as "
                    f"number {block.arrivals}; {count} arrive before anything else touches it, "
                    f"first {_name(program, first)}, for {join.whole} rows",
                )
        if end != join.whole:
            yield Fault("heads", f"the head {where} has {join.whole} rows, its blocks end at {end}")


def _check_thresholds(program: Program) -> Iterator[Fault]:
    raised = [0] * program.counters
    for number, own in enumerate(program.signals):
        for counter in own:
            if counter < 0:
                yield Fault("counter", f"{_name(program, number)} signals counter {counter}")
            else:
                raised[counter] += 1
    early = 1 if program.repeats else 0  # all signals of the step before, or less than all
    for number, waits in enumerate(program.waits):
        for wait in waits:
            if wait.counter < 0:
                yield Fault("counter", f"{_name(program, number)} waits for counter {wait.counter}")
            elif not -early * raised[wait.counter] <= wait.until <= raised[wait.counter]:
                yield Fault(
                    "threshold",
                    f"{_name(program, number)} waits for {wait.until} signals of counter "
                    f"{wait.counter}, which gets {raised[wait.counter]}",
                )


def _deadlock(program: Program, order: list[int]) -> Fault:
    ran = set(order)
    stuck = [next((n for n in queue if n not in ran), None) for queue in program.queues]
    first = next(number for number in stuck if number is not None)
    waits_for = ", ".join(f"counter {w.counter} ≥ {w.until}" for w in program.waits[first])
    return Fault(
        "deadlock",
        f"{len(program.instructions) - len(order)} instructions never run; "
        f"{_name(program, first)} waits for {waits_for}",
    )


def _check_order(program: Program, heads: Heads, order: list[int]) -> Iterator[Fault]:
    """Every earlier conflicting instruction is among those known to be done."""
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
                f"{_name(program, number)} can start before the step before is done: neither it "
                "nor anything that it comes behind waits for the end of that step",
            )


def _missing(earlier: list[Several], known: Known) -> int | None:
    """The last of them that is not known to be done."""
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
        f"{_name(program, late)} {does} {buffer}{box_text(second.box)}; the second can come first, "
        f"for {_LOOSE if program.sharing > 1 else 'no queue and no counter makes it wait'}"
    )


def _verb(program: Program, number: int, region: Region) -> str:
    instruction = program.instructions[number]
    if region in instruction.writes:
        return "writes"
    return "joins in" if region in _joined(instruction) else "reads"


def _name(program: Program, number: int) -> str:
    return f"{program.instructions[number].label} (instruction {number})"
