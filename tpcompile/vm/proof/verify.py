"""The verifier: a proof that every legal execution of a program gives its sequential results.

It checks that every instruction is in exactly one queue of its rank, that the program cannot
deadlock, that the blocks of each head cover it, that scratch memory is written before it is read,
and that a queue or counters order every two conflicting instructions, within one step and across
steps.

If workers share queues, the proof holds for any number of workers per queue, not only for
`sharing`. The order of a shared queue then proves progress (a single worker can run the whole
queue), but it never orders two instructions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpcompile.errors import VerifyError
from tpcompile.pause import paused_collector
from tpcompile.vm.program import Program, Region
from tpcompile.vm.program.operands import disagreements
from tpcompile.vm.program.program import joined
from tpcompile.vm.program.region import box_text
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.conflict import Heads, conflict, heads_of
from tpcompile.vm.proof.defined import check_defined
from tpcompile.vm.proof.done import Done
from tpcompile.vm.proof.earlier import Earlier
from tpcompile.vm.proof.execution import run_order
from tpcompile.vm.proof.fault import Fault, cited
from tpcompile.vm.proof.form import (
    check_buffers,
    check_counters,
    check_heads,
    check_queues,
    check_regions,
    check_thresholds,
)
from tpcompile.vm.proof.known import Known, Several, missing, with_one
from tpcompile.vm.proof.overlap import steps_may_overlap

_LOOSE = (
    "no counter makes it wait, and a shared queue does not order its instructions, because a "
    "program must be valid for any number of workers per queue"
)


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
            got=f"that {faults[0].message}",
        )


@paused_collector()
def check_program(program: Program, parts: Parts | None = None) -> list[Fault]:
    """Return all faults of a program, at most `MOST_LISTED` of them individually.

    Checks that rely on a broken part of the program are skipped. `parts` are those of the
    program's instructions, if the caller has them; those of any others are ignored.
    """
    faults = _faults(program, parts)
    more = len(faults) - MOST_LISTED
    if more > 0:
        faults[MOST_LISTED:] = [Fault("more", f"{more} more faults are not listed", more)]
    return faults


def _faults(program: Program, parts: Parts | None) -> list[Fault]:
    form = check_queues, check_counters, check_buffers
    faults = next(filter(None, (list(check(program)) for check in form)), [])
    if faults:
        return faults
    foreign: list[Fault] = []
    for disagreement in disagreements(program):
        problem = disagreement.problem
        message = f"in {cited(program, disagreement.number)}, {problem.message}"
        (foreign if problem.rule == "rank" else faults).append(Fault(problem.rule, message))
    boxes = parts.boxes if parts and parts.instructions is program.instructions else None
    faults = faults or list(check_regions(program, boxes))
    return foreign + (faults or _order_faults(program, parts))


def _order_faults(program: Program, parts: Parts | None) -> list[Fault]:
    """Return the faults in heads, thresholds, definedness, progress and order.

    All regions must be correct.
    """
    heads = heads_of(program.instructions)
    faults = list(check_heads(program, heads)) + list(check_thresholds(program))
    if faults:
        return faults
    parts = Parts.of(program.instructions, parts)
    undefined = list(check_defined(program, parts))
    order = list(run_order(program))
    if len(order) < len(program.instructions):
        return [*undefined, _deadlock(program, order)]
    return [*undefined, *_check_order(program, Earlier(program, heads, parts), heads, order)]


def _deadlock(program: Program, order: list[int]) -> Fault:
    ran = set(order)
    stuck = [next((n for n in queue if n not in ran), None) for queue in program.queues]
    first = next(number for number in stuck if number is not None)
    waits_for = ", ".join(f"counter {w.counter} ≥ {w.until}" for w in program.waits[first])
    return Fault(
        "deadlock",
        f"{len(program.instructions) - len(order)} instructions never run; "
        f"{cited(program, first)}, the first of them in its queue, waits for {waits_for}",
    )


def _check_order(
    program: Program, earlier: Earlier, heads: Heads, order: list[int]
) -> Iterator[Fault]:
    """Check that conflicting instructions are ordered, within one step and across steps."""
    done = Done(program, order)
    for number, known in done.walk():
        early = _missing(earlier.by_instruction[number], with_one(known, number))
        if early is not None:
            yield Fault("order", _unordered(program, heads, early, number))
    if program.repeats:
        unguarded = list(done.unguarded())
        if unguarded and steps_may_overlap(program):
            return
        for number in unguarded:
            yield Fault(
                "steps",
                f"{cited(program, number)} can start before the previous step is complete: neither "
                "it nor any instruction that must run before it waits for the end of that step",
            )


def _missing(earlier: list[Several], known: Known) -> int | None:
    """Return the last instruction of these sets that is not known to be complete, or None."""
    last: int | None = None
    for members in earlier:
        if members[1] >= known[0]:
            number = missing(members, known)
            if number is not None:
                last = number if last is None else max(last, number)
    return last


def _unordered(program: Program, heads: Heads, early: int, late: int) -> str:
    regions = conflict(program, heads, early, late)
    assert regions is not None
    first, second = regions
    first_verb, second_verb = _verb(program, early, first), _verb(program, late, second)
    buffer = program.buffers[first.buffer].name
    return (
        f"{cited(program, early)} {first_verb} {buffer}{box_text(first.box)} and "
        f"{cited(program, late)} {second_verb} {buffer}{box_text(second.box)}; "
        "the second can run first: "
        f"{_LOOSE if program.sharing > 1 else 'neither a queue nor a counter makes it wait'}"
    )


def _verb(program: Program, number: int, region: Region) -> str:
    instruction = program.instructions[number]
    if region in instruction.writes:
        return "writes"
    return "writes a block of" if region in joined(instruction) else "reads"
