"""Counters, by which instructions wait for each other, and the turns of a worker.

Counters are never cleared: in each step, thresholds grow by the signals of a step.
"""

from time import perf_counter_ns

import triton
import triton.language as tl

from tpcompile.backends.triton.options import WARPS

from . import abi
from .access import start_of
from .numbers import INTERPRETED

_LINES = tl.constexpr(256)
_LINE_BYTES = tl.constexpr(128)
_THREADS = tl.constexpr(32 * WARPS)
_host_clock = tl.constexpr(perf_counter_ns)


@triton.jit
def fetch(number, weights, buffers):
    """Ask for the first 32 KB of an instruction's weights, which do not depend on its waits.

    They are then in the L2 cache when the instruction begins. `weights` has the buffer, the first
    byte and the bytes of each instruction. Triton has no such operation, so this is inline
    assembly, which the interpreter leaves out.
    """
    if not INTERPRETED:
        buffer = tl.load(weights + 3 * number)
        if buffer != abi.NONE:
            last = tl.load(weights + 3 * number + 2) - 1
            first = start_of(buffers, buffer, tl.int8) + tl.load(weights + 3 * number + 1)
            lines = first + tl.minimum(tl.arange(0, _LINES) * _LINE_BYTES, last)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [lines],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def now(TIMED: tl.constexpr):
    """Return the time in ns when all warps have come this far; 0 unless instructions are TIMED."""
    time = 0
    if TIMED:
        tl.debug_barrier()
        if INTERPRETED:
            time = _host_clock()
        else:
            time = tl.inline_asm_elementwise(
                "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
            )
    return time


@triton.jit
def record(times, number, taken, ready, done, TIMED: tl.constexpr):
    """Store the times at which an instruction was taken, became ready and was done, if TIMED."""
    if TIMED:
        tl.store(times + 3 * number, taken)
        tl.store(times + 3 * number + 1, ready)
        tl.store(times + 3 * number + 2, done)


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
    within SPINS polls. The counter is then left in `stuck`. Each thread polls on its own, so all of
    them agree at the end.
    """
    going = step < tl.load(last, volatile=True)
    place = tl.load(wait_offsets + number)
    end = tl.load(wait_offsets + number + 1)
    while going & (place < end):
        counter = tl.load(wait_values + 2 * place)
        until = tl.load(wait_values + 2 * place + 1) + (before + step) * tl.load(totals + counter)
        value = _look(counters + counter)
        looks = 1
        while going & (value < until) & (looks < SPINS):
            going = step < tl.load(last, volatile=True)
            value = _look(counters + counter)
            looks += 1
        if value < until:
            tl.store(stuck, counter)
            going = step < 0
        place += 1
    return _all_agree(going) & (step < tl.load(last, volatile=True))


@triton.jit
def _look(counter):
    """Return the value of a counter; what was stored before its signals can be seen then.

    Triton's only acquiring loads are atomic operations, in which one thread asks and hands on
    what it gets.
    """
    if INTERPRETED:
        value = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    else:
        value = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s64 $0, [$1];",
            "=l,l",
            [counter],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    return value


@triton.jit
def _all_agree(going):
    """Return whether all threads of the worker agree to go on; this synchronises them."""
    if not INTERPRETED:
        tl.debug_barrier()
        votes = tl.zeros([_THREADS], tl.int32) + going.to(tl.int32)
        going = tl.min(votes, 0) > 0
    return going


@triton.jit
def signals_of(number, signal_offsets, signal_values):
    """Return where the signals of an instruction begin and end, and the counter of the first."""
    first = tl.load(signal_offsets + number)
    last = tl.load(signal_offsets + number + 1)
    return first, last, tl.load(signal_values + first, mask=first < last, other=0)


@triton.jit
def signal(first, last, counter, signal_values, counters):
    """Increment the counters of an instruction that is done."""
    tl.debug_barrier()
    for place in range(first, last):
        if place > first:
            counter = tl.load(signal_values + place)
        tl.atomic_add(counters + counter, 1, sem="release", scope="gpu")


@triton.jit
def next_turn(turn, tickets, SHARING: tl.constexpr):
    """Return the next turn of a worker; workers that share a queue take one from each other."""
    if SHARING == 1:
        turn += 1
    else:
        turn = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    return turn
