"""Proof that steps may start before the previous step is complete.

Counters are never cleared, so a counter's value belongs to a single step only if no signal of the
next step arrives before all signals of this one. If that is proved for every counter, steps can be
treated as if each had counters of its own, and any two consecutive steps behave like the first two.
Steps that are further apart are ordered too: of two conflicting instructions at least one writes,
so it conflicts with itself, and its execution in a step in between is ordered between the two.
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
    """Return whether a program whose individual steps are valid stays valid if steps start early.

    The check examines two steps at once, so it is meant only for the few programs that need it.
    """
    two_steps, count = _told_apart(program), len(program.instructions)
    order = list(run_order(two_steps))
    if len(order) < len(two_steps.instructions):
        return False
    all_of = {
        counter: several(members) for counter, members in enumerate(program.signallers) if members
    }
    earlier = Earlier(two_steps, heads_of(two_steps.instructions))
    for number, known in Done(two_steps, order).walk():
        wanted = list(earlier.by_instruction[number])
        if number >= count:
            wanted += [all_of[counter] for counter in program.signals[number - count]]
        known = with_one(known, number)
        if any(missing(members, known) is not None for members in wanted):
            return False
    return True


def _told_apart(program: Program) -> Program:
    """Return a program of two steps, the second with counters of its own.

    A wait of the second step also waits for all signals that the counter gets in the first step.
    """
    totals = [len(signallers) for signallers in program.signallers]
    apart = len(totals)
    second = tuple(
        tuple(
            wait
            for counter, until in waits
            for wait in (
                Wait(counter, totals[counter] + min(until, 0)),
                Wait(counter + apart, max(until, 0)),
            )
            if wait.until
        )
        for waits in program.waits
    )
    signals = tuple(tuple(counter + apart for counter in counters) for counters in program.signals)
    return replace(
        unrolled(program, 2),
        waits=program.waits + second,
        signals=program.signals + signals,
    )
