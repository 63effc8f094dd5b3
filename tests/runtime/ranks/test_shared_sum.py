"""Shared memory between ranks: who has it, and what there is instead."""

from __future__ import annotations

import datetime
import errno
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import launches
from tests.runtime.ranks.left_behind import gone, in_time, only_files, own_files
from tests.runtime.ranks.tiny_ranks import Doubled, modules, step
from tpcompile import cpp
from tpcompile.comm import SharedExchange
from tpcompile.errors import RankError
from tpcompile.runtime.ranks import launcher, shared_memory, shared_sum
from tpcompile.runtime.ranks.shared_sum import agreed, offered
from tpcompile.runtime.ranks.spawned import SpawnedRanks

CPU = torch.device("cpu")
WARNING = "tpcompile: warning: ranks sum over"
BODY = """
        if int(x[0]) == RANK:
            os.kill(os.getpid(), int(x[1]))
        shared = self.group._shared is not None
        return torch.cat([self.group.all_reduce(x), torch.tensor([int(shared)])])"""
"""Rank `x[0]` sends itself the signal `x[1]`; the last number says whether memory is shared."""


@pytest.fixture(autouse=True)
def _warnings_again() -> Iterator[None]:
    shared_sum.warn.cache_clear()
    yield
    shared_sum.warn.cache_clear()


@pytest.fixture(autouse=True)
def _forked_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    launches.ready()
    monkeypatch.setattr(launcher, "start_process", launches.start_forked)


@contextmanager
def _small_files(size: int) -> Iterator[None]:
    """Let no file of this process, in memory or not, be larger."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _found(tp: int) -> list[int]:
    """Return the sum of `tp` ranks of [8, 9], and whether it was in shared memory."""
    ranks = SpawnedRanks(tp)
    try:
        ranks.load(modules(tp, BODY), lambda name, index: torch.ones(1), Doubled)
        values: list[int] = ranks.run(step(x=torch.tensor([8, 9]))).tolist()
        return values
    finally:
        ranks.close()


@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_of_a_script_share_memory(tp: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = own_files()
    assert _found(tp) == [8 * tp, 9 * tp, 1]
    assert only_files(before)
    assert capfd.readouterr().err == ""


def test_too_little_memory_is_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    with _small_files(4096):
        for _ in range(2):
            with offered(2) as offer:
                assert offer is None
        assert _found(2) == [16, 18, 0]
    warning = capfd.readouterr().err
    assert warning.startswith(WARNING) and "File too large" in warning
    assert warning.count("\n") == 1


def test_no_compiler_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)
    assert _found(2) == [16, 18, 0]
    warning = capfd.readouterr().err
    assert warning.startswith(WARNING) and "needs a C++ compiler" in warning
    assert warning.count("\n") == 1


def test_one_rank_needs_no_memory() -> None:
    with offered(1) as offer:
        assert offer is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_rank_killed_while_others_wait_in_a_sum(number: int) -> None:
    before = own_files()
    ranks = SpawnedRanks(3)
    ranks.load(modules(3, BODY), lambda name, index: torch.ones(1), Doubled)
    pids = ranks.processes
    message = f"Rank 1 was killed by signal {signal.Signals(number).name}"
    with in_time(), pytest.raises(RankError, match=message):
        ranks.run(step(x=torch.tensor([1, number])))
    assert gone(pids, 0.0)
    assert only_files(before)


def _agreed(ranks: int, timeout: float = 30.0) -> list[SharedExchange | None]:
    """Return the exchanges on which ranks of a process group agree; threads stand for ranks."""
    store: Any = dist.HashStore()

    def agree(rank: int) -> SharedExchange | None:
        gloo: Any = dist.ProcessGroupGloo
        return agreed(gloo(store, rank, ranks, datetime.timedelta(seconds=timeout)), CPU)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(agree, range(ranks)))


def test_ranks_of_a_launcher_agree_on_memory() -> None:
    exchanges = _agreed(3, timeout=7.0)
    every = [exchange for exchange in exchanges if exchange is not None]
    assert len(every) == 3
    assert {exchange._timeout for exchange in every} == {7.0}
    with ThreadPoolExecutor(3) as pool:
        sums = list(
            pool.map(lambda exchange: exchange.all_reduce(torch.ones(2), torch.float32), every)
        )
    assert [total.tolist() for total in sums] == [[3.0, 3.0]] * 3


def test_one_rank_and_other_devices_have_no_memory() -> None:
    group: Any = dist.ProcessGroupGloo
    assert agreed(group(dist.HashStore(), 0, 1, datetime.timedelta(seconds=5)), CPU) is None

    class Two:
        """A group of another backend; nothing may be exchanged over it."""

        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

    for device in ("cpu", "cuda"):
        assert agreed(Two(), torch.device(device)) is None


def _only_on(rank_calls: Callable[[], Any], instead: Any) -> Callable[..., Any]:
    """Call `rank_calls` for all threads but the first one that comes; that one gets `instead`."""
    lock, done = threading.Lock(), []

    def call(*args: Any) -> Any:
        with lock:
            done.append(1)
            first = len(done) == 1
        return instead if first else rank_calls(*args)

    return call


def test_if_one_rank_has_no_library_all_keep_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_sum, "_library", _only_on(shared_sum._library, None))
    assert _agreed(3) == [None] * 3


def test_if_one_rank_cannot_see_the_others_all_keep_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_sum, "_peers", _only_on(shared_sum._peers, None))
    assert _agreed(3) == [None] * 3


def test_ranks_on_several_hosts_keep_the_group(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = own_files()
    monkeypatch.setattr(shared_memory, "_open", _only_on(shared_memory._open, -1))
    assert _agreed(3) == [None] * 3
    assert capfd.readouterr().err == ""
    assert only_files(before)


def test_too_little_memory_under_a_launcher_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert _agreed(2) == [None] * 2
    warning = capfd.readouterr().err
    assert warning.startswith(WARNING) and "No space left on device" in warning
    assert warning.count("\n") == 1
