"""Known mistakes of real schedulers for such programs, by name.

Two concern executors rather than programs: counters read without fences, and a comparison that
cannot fail. Some apply to the whole program, some to one layer.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.vm.mutants.bases import Base, described
from tests.vm.mutants.orders import Made, shared
from tests.vm.mutations import changed
from tpcompile.vm.groups import AllReduce, LinearTerms, PartialAttention
from tpcompile.vm.groups.reduce import SumOperands
from tpcompile.vm.groups.residual import Site
from tpcompile.vm.program import Instruction, Region, Wait
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.proof.execution import unrolled
from tpcompile.vm.schedule.clock import timing

COUNTS = (2, 3, 4, 8, 64, 192, 512)


def barrier_count_written_down(base: Base, dice: Random) -> Made:
    """Give all waits of a kind a threshold from another program."""
    waits = base.program.waits
    kinds = {s.name for s, old in zip(base.steps, waits, strict=True) if any(w.until for w in old)}
    kind, count = dice.choice(sorted(kinds)), dice.choice(COUNTS)
    written = tuple(
        tuple(Wait(w.counter, count) if w.until and step.name == kind else w for w in old)
        for step, old in zip(base.steps, waits, strict=True)
    )
    return f"{kind} waits for {count}", replace(base.program, waits=written)


def partial_does_not_wait_for_q(base: Base, dice: Random) -> Made:
    """Let attention of a layer wait only for keys and values."""
    layer = _layer(base, dice)

    def without(step: StepInstruction) -> Instruction:
        if not isinstance(step, PartialAttention) or step.layer != layer:
            return step
        reads = tuple(region for region in step.reads if region.buffer != step.at.q)
        return replace(described(step), reads=reads)

    return f"no Q in layer {layer}", base.scheduled_as(tuple(map(without, base.steps)))


def partial_does_not_wait_for_the_new_token(base: Base, dice: Random) -> Made:
    """Treat the new token as part of the past, in the span that contains it."""
    layer = _layer(base, dice)

    def without(step: StepInstruction) -> Instruction:
        if not isinstance(step, PartialAttention) or step.layer != layer:
            return step
        past = tuple(
            Region(r.buffer, (*r.box[:-1], (0, 1))) if r.buffer == step.at.cache else r
            for r in step.reads
        )
        return replace(described(step), reads=past)

    return f"the past only in layer {layer}", base.scheduled_as(tuple(map(without, base.steps)))


def residual_added_to_while_it_is_read(base: Base, dice: Random) -> Made:
    """Add to the residual in place, while other instructions may still read the old one.

    Each addition waits for its columns, as the terms did; each rank adds to all ranks' residuals.
    """
    sums = {s.layer: s.at for s in base.steps if _sums_mlp(s)}
    if not sums:
        return None
    layer = dice.choice(sorted(sums))

    def in_place(step: StepInstruction) -> Instruction:
        if not isinstance(step, LinearTerms) or (step.layer, step.at.site) != (layer, Site.MLP):
            return step
        operands: SumOperands = sums[layer]
        batch = (0, operands.batch)
        added = tuple(
            Region(operands.residual - operands.rank + rank, (batch, step.rows))
            for rank in range(operands.ranks)
        )
        return replace(described(step), reads=step.reads + added, writes=added)

    instructions = tuple(map(in_place, base.steps))
    return f"in place in layer {layer}", replace(base.program, instructions=instructions)


def _sums_mlp(step: StepInstruction) -> bool:
    return isinstance(step, AllReduce) and step.at.site == Site.MLP


def terms_added_in_any_order(base: Base, dice: Random) -> Made:
    """Let workers or ranks add their terms to one slot in any order, as with atomics."""
    sites = {(s.layer, s.at.site) for s in base.steps if isinstance(s, LinearTerms)}
    if not sites:
        return None
    place = dice.choice(sorted(sites))

    def together(step: StepInstruction) -> Instruction:
        if not isinstance(step, LinearTerms) or (step.layer, step.at.site) != place:
            return step
        operands = replace(step.at, out=step.at.out - step.rank)
        return replace(step, at=operands, slot=0) if base.case.tp > 1 else replace(step, slot=0)

    instructions = tuple(map(together, base.steps))
    return f"one place for layer {place}", replace(base.program, instructions=instructions)


def counter_of_two_producers(base: Base, dice: Random) -> Made:
    """Merge the counter of a wait with one that earlier instructions signal."""
    program = base.program
    number = dice.choice(
        [n for n, waits in enumerate(program.waits) if any(w.until for w in waits)]
    )
    wait = dice.choice([w for w in program.waits[number] if w.until])
    early = {c for counters in program.signals[:number] for c in counters} - {wait.counter}
    if not early:
        return None
    gone = dice.choice(sorted(early))
    return f"{number} waits for {gone} too", shared(program, wait.counter, gone)


def queue_by_length_alone(base: Base, dice: Random) -> Made:
    """Order a queue by length alone, whether or not inputs can be ready."""
    place = dice.randrange(len(base.program.queues))
    numbers = base.program.queues[place]
    queue = tuple(sorted(numbers, key=lambda n: (-base.costs[n], n)))
    queues = changed(base.program.queues, place, queue)
    return f"queue {place} by length", replace(base.program, queues=queues)


def clock_trusted(base: Base, dice: Random) -> Made:
    """Drop waits for inputs that are ready when the worker is free, by the scheduler's clock.

    Only half of them are dropped, so that mutants differ.
    """
    program = base.program
    times = timing(program, base.costs)
    ready = [0.0] * program.counters
    for number, counters in enumerate(program.signals):
        for counter in counters:
            ready[counter] = max(ready[counter], times.finishes[number])
    free = [0.0] * (1 + max(times.workers))
    waits = [()] * len(program.waits)  # type: list[tuple[Wait, ...]]
    for number in sorted(range(len(waits)), key=times.starts.__getitem__):
        worker = times.workers[number]
        waits[number] = tuple(
            wait
            for wait in program.waits[number]
            if not wait.until or ready[wait.counter] > free[worker] or dice.random() < 0.5
        )
        free[worker] = times.finishes[number]
    dropped = [n for n, old in enumerate(program.waits) if old != waits[n]]
    return f"no waits in {dropped}", replace(program, waits=tuple(waits))


def no_waits_between_steps(base: Base, dice: Random) -> Made:
    """Drop all waits between steps, so that the next token may start too early."""
    waits = tuple(tuple(w for w in old if w.until) for old in base.program.waits)
    return "no step waits", replace(base.program, waits=waits)


def counters_cleared(base: Base, dice: Random) -> Made:
    """Reuse the thresholds of the first step in the second, without clearing counters."""
    again = replace(unrolled(base.program, 2), waits=base.program.waits * 2)
    return "thresholds as in the first step", again


def _layer(base: Base, dice: Random) -> int:
    return dice.choice(sorted({s.layer for s in base.steps if isinstance(s, PartialAttention)}))


TRAPS = {
    25: (barrier_count_written_down,),
    26: (partial_does_not_wait_for_q,),
    13: (partial_does_not_wait_for_the_new_token,),
    27: (residual_added_to_while_it_is_read,),
    28: (terms_added_in_any_order,),
    30: (counter_of_two_producers,),
    31: (queue_by_length_alone, clock_trusted),
    32: (no_waits_between_steps, counters_cleared),
}
"""Kinds by the number of the trap.

Traps 29 and 33 cannot be expressed in a program. 29 concerns how an executor reads counters: the
same program is right with fences and wrong without. 33 concerns comparison scripts, which
tests/compare/program tests with mistakes of its own.
"""
