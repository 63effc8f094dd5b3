"""Tests of the launcher that forks workers: faults neither hang nor leave processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.runtime.ranks.left_behind import descendants, in_time, parent_of, stopped_running
from tests.runtime.ranks.tiny_ranks import Doubled, modules, step
from tpcompile.errors import RankError
from tpcompile.runtime.ranks import workers
from tpcompile.runtime.ranks.spawned import SpawnedRanks


def _launcher_of(ranks: SpawnedRanks) -> int:
    (parent,) = {parent_of(pid) for pid in ranks.processes}
    assert parent_of(parent) == os.getpid()
    return parent


def _loaded(tp: int = 3) -> SpawnedRanks:
    ranks = SpawnedRanks(tp)
    ranks.load(modules(tp), None, Doubled)
    return ranks


def test_all_workers_are_forks_of_one_process_and_none_is_left() -> None:
    before = descendants()
    ranks = _loaded()
    launcher = _launcher_of(ranks)
    assert descendants() - before == {launcher, *ranks.processes}
    assert len(set(ranks.processes)) == 3
    ranks.close()
    assert descendants() <= before


def test_one_that_is_killed_takes_its_workers_along() -> None:
    ranks = _loaded()
    pids = [_launcher_of(ranks), *ranks.processes]
    os.kill(pids[0], signal.SIGKILL)
    assert stopped_running(pids)
    with pytest.raises(RankError, match=r"Rank \d was killed by signal SIGKILL"):
        ranks.run(step(x=torch.tensor([1])))
    assert ranks.closed


def test_one_that_is_stopped_cannot_keep_its_workers() -> None:
    ranks = _loaded()
    pids = [_launcher_of(ranks), *ranks.processes]
    os.kill(pids[0], signal.SIGSTOP)
    assert ranks.run(step(x=torch.tensor([2]))).tolist() == [6]  # the launcher is not needed
    ranks.close()
    assert stopped_running(pids)


def _with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Make workers import this file as torch."""
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


HANGS = "import time\ntime.sleep(1000)"
ENDS = "import os\nos._exit(3)"
ASK: dict[str, Callable[[SpawnedRanks], object]] = {
    "load": lambda ranks: ranks.load(modules(3), None, Doubled),
    "processes": lambda ranks: ranks.processes,
}


@pytest.mark.parametrize("ask", ASK)
def test_one_that_hangs_before_there_are_workers(
    ask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all ranks hang before they can answer, the error shows where."""
    _with_torch(tmp_path, monkeypatch, HANGS)
    monkeypatch.setattr(workers, "_START_S", 2.0)
    before = descendants()
    ranks = SpawnedRanks(3, timeout=1.0)
    with pytest.raises(RankError, match="Rank 0 and rank 1 and rank 2 did not answer") as caught:
        ASK[ask](ranks)
    assert caught.value.got.count("torch.py") == 3
    ranks.close()
    assert descendants() <= before


@pytest.mark.parametrize("ask", ASK)
def test_one_that_ends_before_there_are_workers(
    ask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_torch(tmp_path, monkeypatch, ENDS)
    before = descendants()
    ranks = SpawnedRanks(2)
    with pytest.raises(RankError, match="Rank 0 exited with status 3"):
        ASK[ask](ranks)
    ranks.close()
    assert descendants() <= before


def test_one_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that cannot start reports why, here a path without site-packages."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(RankError, match=r"(?s)Rank 0 exited with status 1.*No module"):
        SpawnedRanks(1).load(modules(1), None, Doubled)


def test_one_that_has_no_workers_yet_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_torch(tmp_path, monkeypatch, HANGS)
    before = descendants()
    with in_time():
        SpawnedRanks(2).close()
    assert descendants() <= before
