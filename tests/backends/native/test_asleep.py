"""Torch's threads sleep while a caller waits for a launch."""

from __future__ import annotations

import ctypes
import functools
import operator
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from tpcompile.backends.native import asleep as module
from tpcompile.backends.native.asleep import asleep

LIBC = OPEN_MP = ctypes.CDLL(None)
needs_open_mp = pytest.mark.skipif(
    not hasattr(OPEN_MP, "GOMP_parallel"), reason="torch was built without OpenMP"
)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@needs_open_mp
def test_the_wait_is_in_a_region_of_all_threads(threads: int) -> None:
    """The other threads of a region sleep until it ends; a single thread needs no region."""
    assert asleep(OPEN_MP.omp_get_num_threads) == threads
    assert asleep(lambda: bool(OPEN_MP.omp_in_parallel())) == (threads > 1)
    assert not OPEN_MP.omp_in_parallel()


def test_results_and_errors_are_passed_on(threads: int) -> None:
    assert asleep(lambda: asleep(lambda: torch.ones(1 << 20).sum().item())) == 1 << 20
    assert asleep(lambda: None) is None
    with pytest.raises(KeyError, match="missing"):
        asleep(lambda: {}["missing"])


def test_an_interrupt_before_the_first_line_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not printed and ignored, as errors of a ctypes callback are."""
    interrupt = functools.partial(LIBC["raise"], signal.SIGINT)

    class Library:
        def tpc_asleep(self, wait: Callable[[], None]) -> None:
            """Call both from C, so that Python sees the signal when the callback starts."""
            list(map(operator.call, (interrupt, wait)))

    calls: list[int] = []
    monkeypatch.setattr(module, "library", Library)
    with pytest.raises(KeyboardInterrupt):
        asleep(lambda: calls.append(0))
    assert not calls


def test_an_interrupt_during_the_wait_is_raised(threads: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        asleep(functools.partial(LIBC["raise"], signal.SIGINT))
