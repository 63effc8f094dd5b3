"""Counters, by which instructions wait for each other, and the turns of a worker.

Counters are never cleared: in each step, thresholds grow by the signals of a step.
"""

import triton
import triton.language as tl


@triton.jit
def comes(
    number,
    step,
    before,
    wait_offsets,
    wait_values,
    totals,
    counters,
    last,
    stuck,
    SPINS: tl.constexpr,
):
    """Wait until an instruction may run; return whether it may.

    It may not if the launch has ended before this step, or if a counter did not reach its value
    within SPINS looks. The counter is then left in `stuck`.
    """
    going = step < tl.load(last, volatile=True)
    at = tl.load(wait_offsets + number)
    end = tl.load(wait_offsets + number + 1)
    while going & (at < end):
        counter = tl.load(wait_values + 2 * at)
        until = tl.load(wait_values + 2 * at + 1) + (before + step) * tl.load(totals + counter)
        seen = tl.atomic_add(counters + counter, 0, sem="acquire", scope="gpu")
        looks = 1
        while going & (seen < until) & (looks < SPINS):
            seen = tl.atomic_add(counters + counter, 0, sem="acquire", scope="gpu")
            going = step < tl.load(last, volatile=True)
            looks += 1
        if seen < until:
            tl.store(stuck, counter)
            going = step < 0
        at += 1
    tl.debug_barrier()
    return going & (step < tl.load(last, volatile=True))


@triton.jit
def signal(number, signal_offsets, signal_values, counters):
    """Increment the counters of an instruction that is done."""
    tl.debug_barrier()
    first = tl.load(signal_offsets + number)
    last = tl.load(signal_offsets + number + 1)
    for at in range(first, last):
        counter = tl.load(signal_values + at)
        tl.atomic_add(counters + counter, 1, sem="release", scope="gpu")


@triton.jit
def next_turn(turn, tickets, SHARING: tl.constexpr):
    """Return the next turn of a worker; workers that share a queue take one from each other."""
    if SHARING == 1:
        turn += 1
    else:
        turn = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    return turn
