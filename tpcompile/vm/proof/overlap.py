"""Steps that begin before the last one is done, and why some of them may.

Counters are never cleared, so what they come to belongs to one step only as long as none of the
next step's signals arrives before all of this step's. Where that is proved for every counter, two
steps can be told apart as if each had counters of its own, and any two that follow each other go
as the first two do. What is further apart is ordered too: of two that conflict at least one
writes, so it conflicts with itself, and what it did in the step between comes in between.
"""

from __future__ import annotations

from dataclasses import replace

from tpcompile.vm.program import Program, Wait
from tpcompile.vm.proof.conflict import heads_of
from tpcompile.vm.proof.done import Done
from tpcompile.vm.proof.earlier import Earlier
from tpcompile.vm.proof.execution import run_order, unrolled
from tpcompile.vm.proof.known import missing, several, with_one


def steps_may_overlap(program: Program) -> bool:
    """Whether a program whose steps are valid stays so while they begin early.

    It looks at two steps at once, so it is for the few programs that need it.
    """
    both, count = _told_apart(program), len(program.instructions)
    order = list(run_order(both))
    if len(order) < len(both.instructions):
        return False
    all_of = {counter: several(own) for counter, own in enumerate(program.signallers) if own}
    earlier = Earlier(both, heads_of(both.instructions))
    for number, known in Done(both, order).walk():
        wanted = list(earlier.of[number])
        if number >= count:
            wanted += [all_of[counter] for counter in program.signals[number - count]]
        known = with_one(known, number)
        if any(missing(some, known) is not None for some in wanted):
            return False
    return True


def _told_apart(program: Program) -> Program:
    """Two steps, the second with counters of its own.

    A wait of the second step also means all signals of the first that the counter got.
    """
    totals = [len(own) for own in program.signallers]
    apart = len(totals)
    second = tuple(
        tuple(
            wait
            for counter, until in own
            for wait in (
                Wait(counter, totals[counter] + min(until, 0)),
                Wait(counter + apart, max(until, 0)),
            )
            if wait.until
        )
        for own in program.waits
    )
    signals = tuple(tuple(counter + apart for counter in own) for own in program.signals)
    return replace(
        unrolled(program, 2),
        waits=program.waits + second,
        signals=program.signals + signals,
    )
