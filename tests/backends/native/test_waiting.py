"""Workers that lose their cores: others run what they wait with, and the bits stay the same."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.backends.reference.stepping import Case, place
from tpcompile.backends.native import Native
from tpcompile.backends.native.executor import Native as Executor

CASE = Case("tiny-qwen3", lengths=(9, 3), spans=1, policy="dynamic", workers=3, blocks_per_worker=4)
STEPS = 3
_HOLD, _RELEASE = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6
_LIBC = ctypes.CDLL(None, use_errno=True)


def _run(native: Executor, case: Case, launches: int = 1) -> list[torch.Tensor]:
    """Return the tokens and logits of some launches from the same state."""
    values: list[torch.Tensor] = []
    for _ in range(launches):
        place(native, case)
        values += [native.run(STEPS), native.logits.clone()]
    return values


def _threads(native: Executor) -> list[int]:
    """Return the ids of the workers' threads, which stand on the board."""
    seats = native._board[64:].view(torch.int32).view(-1, 16)
    return [int(thread) for thread in seats[:, 2]]


def _cores(native: Executor) -> list[set[int]]:
    """Return the cores that each worker may use, in their order."""
    return sorted((os.sched_getaffinity(thread) for thread in _threads(native)), key=min)


def _launch_until_on(native: Executor, cores: list[set[int]], wanted: list[torch.Tensor]) -> None:
    """Launch until the workers may use these cores, and compare the results of every launch.

    A worker that has had no time yet has not moved: others did its part of the launch.
    """
    end = time.monotonic() + 60
    while True:
        assert all(map(torch.equal, wanted, _run(native, CASE)))
        if _cores(native) == cores:
            return
        assert time.monotonic() < end, f"workers may use {_cores(native)}, not {cores}"


@contextmanager
def _held(thread: int) -> Iterator[None]:
    """Stop a thread: the handler of one signal, `pause`, returns after another signal.

    The handlers stay, because the thread receives the second signal at some later time.
    """
    for number, handler in ((_HOLD, _LIBC.pause), (_RELEASE, _LIBC.abs)):
        _LIBC.signal(number, ctypes.cast(handler, ctypes.c_void_p))
    _LIBC.tgkill(os.getpid(), thread, _HOLD)
    try:
        yield
    finally:
        threading.Thread(target=_release, args=(thread,)).start()


def _release(thread: int) -> None:
    """Release a held thread, again and again until it ends.

    A thread that gets both signals at once handles the second one first, and pauses after it.
    """
    while _LIBC.tgkill(os.getpid(), thread, _RELEASE) == 0:
        time.sleep(0.05)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Start processes that use all the time of a core, and end them afterwards."""
    command = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize("held", range(CASE.workers))
def test_a_worker_without_a_core_holds_nothing_up(held: int) -> None:
    """It sleeps with a claim on an instruction of the next launch; others run that one too."""
    native = Native(CASE.memory())
    wanted = _run(native, CASE, launches=3)
    with _held(_threads(native)[held]):
        actual = _run(native, CASE, launches=3)
    later = _run(native, CASE, launches=3)
    native.close()
    for before, during, after in zip(wanted, actual, later, strict=True):
        assert torch.equal(before, during) and torch.equal(before, after)


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("policy", ["dynamic", "critical-path"])
@pytest.mark.parametrize("tp", [1, 2])
def test_bits_beside_busy_processes(tp: int, policy: str, workers: int) -> None:
    case = replace(CASE, tp=tp, policy=policy, workers=workers)
    native = Native(case.memory())
    wanted = _run(native, case)
    with _busy(2):
        actual = _run(native, case, launches=20)
    native.close()
    for turn, value in enumerate(actual):
        assert torch.equal(value, wanted[turn % 2])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_return_to_their_cores() -> None:
    """Somebody may move them all to one core, and later give them back what they had."""
    initial = os.sched_getaffinity(0)
    first, second = sorted(initial)[:2]
    os.sched_setaffinity(0, {first, second})
    try:
        native = Native(replace(CASE, workers=2).memory())
    finally:
        os.sched_setaffinity(0, initial)
    wanted = _run(native, CASE)
    _launch_until_on(native, [{first}, {second}], wanted)
    for allowed, cores in (({first}, [{first}, {first}]), ({first, second}, [{first}, {second}])):
        for thread in _threads(native):
            os.sched_setaffinity(thread, allowed)
        _launch_until_on(native, cores, wanted)
    native.close()
