"""Ranks that a script starts: they work, they fail by name, and they leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import launches
from tests.runtime.ranks.tiny_ranks import WEIGHT, Doubled, halves, programs, step
from tpcompile.errors import CheckpointError, RankError, UsageError
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.checkpoint_files import SINGLE
from tpcompile.runtime.ranks import launcher
from tpcompile.runtime.ranks.spawned import SpawnedRanks
from tpcompile.runtime.ranks.worker_process import WorkerProcess
from tpcompile.runtime.ranks.workers import Workers

ROOT = Path(__file__).parents[3]
VALUES = torch.arange(24.0).view(6, 4)
FAULT_S = 30.0
"""A fault is told within this time: half of the limit of a rank that just waits (60 s), so it was
not that limit that told it, and much more than a busy machine needs."""
SILENCE_S = 5.0
"""The limit, for tests that wait for it."""
ACTS = """
        if int(x[0]) == RANK:
            if int(x[1]) == 0:
                raise ValueError("this rank fails")
            if int(x[1]) == 1:
                os.kill(os.getpid(), 9)
            if int(x[1]) == 2:
                time.sleep(1000)
            if int(x[1]) == 3:
                print("something odd", file=sys.stderr)
                os._exit(7)
            if int(x[1]) == 4:
                os.kill(os.getpid(), 7)
        return self.group.all_reduce(x)"""
"""Rank `x[0]` does the odd thing `x[1]`."""


def read(name: str, index: tuple[slice, ...]) -> torch.Tensor:
    assert name == WEIGHT.name
    return VALUES[index]


def _spawn(body: str = ACTS, tp: int = 2) -> SpawnedRanks:
    ranks = SpawnedRanks(tp)
    ranks.load(programs(tp, body), read, Doubled)
    return ranks


def _soon_silent(ranks: SpawnedRanks) -> None:
    """A shorter limit from here on: starting and loading may take long on a busy machine."""
    ranks._workers._timeout = SILENCE_S


def _gone(pids: list[int], seconds: float = FAULT_S) -> bool:
    """No such process is left, not even as a zombie."""
    return _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds)


def _until(holds: Callable[[], bool], seconds: float = FAULT_S) -> bool:
    """Whether it holds, at once or within this time."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _files() -> set[str]:
    """What this process has open, and what lies in the memory file system."""
    own = set()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            own.add(f"{file} {os.readlink(f'/proc/self/fd/{file}')}")
    return own | set(os.listdir("/dev/shm"))


def _only(before: set[str]) -> bool:
    """Nothing was left open or behind since; others may use the memory file system meanwhile."""
    return _until(lambda: _files() <= before)


@contextlib.contextmanager
def _in_time(seconds: float = FAULT_S) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


@pytest.fixture(autouse=True)
def _forked_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the ranks that a test starts itself, most of which it ends; `ranks` start as ever."""
    launches.ready()
    monkeypatch.setattr(launcher, "start_process", launches.start_forked)


@pytest.fixture(scope="module")
def ranks() -> Iterator[SpawnedRanks]:
    """Two healthy ranks with half of a weight each, from memory."""
    body = """
        if x.dim() == 2:
            return torch.cat([self.group.all_reduce(x)] * int(x[0, 0]))
        if len(x) == 3:
            return torch.tensor([RANK])
        cos, sin = self.rotary(x, 3, torch.bfloat16)
        seen = [name in sys.modules for name in ("transformers", "pytest", "tests")]
        state = [*seen, torch.get_num_threads(), RANK, int(cos[1, 0]), int(sin[1, 0])]
        return self.group.all_gather(torch.tensor([state]), 0, (1, 1))"""
    shown: list[tuple[int, int]] = []
    found: list[SpawnedRanks] = []

    def make() -> None:
        found.append(SpawnedRanks(2))
        found[0].load(
            programs(
                2,
                body,
                arguments="x, positions=None",
                parameters=halves(),
                rotary=((3, torch.bfloat16),),
            ),
            read,
            Doubled,
            lambda done, of: shown.append((done, of)),
        )

    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    assert _until(lambda: not Path(f"/proc/self/task/{maker.native_id}").exists())
    assert shown == [(1, 2), (2, 2)]
    yield found[0]
    found[0].close()


def _healthy(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": x, "positions": torch.tensor([4, 5])}


def test_ranks_outlive_the_thread_that_made_them(ranks: SpawnedRanks) -> None:
    """The fixture made them in one that has ended: to the system, that is the end of a parent."""
    assert all(Path(f"/proc/{pid}").exists() for pid in ranks.processes)
    x = torch.ones(1, 1)
    assert torch.equal(ranks.run(step(**_healthy(x))), x + x)


def test_ranks_work_together(ranks: SpawnedRanks) -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert torch.equal(ranks.run(step(**_healthy(x))), x + x)


def test_every_rank_can_be_asked(ranks: SpawnedRanks) -> None:
    """Each gives what it has itself, here its own number; they may be asked as before again."""
    x = torch.tensor([4, 5, 0])
    found = ranks.run_all(step(**_healthy(x)))
    assert [result.tolist() for result in found] == [[0], [1]]
    assert ranks.run(step(**_healthy(x))).tolist() == [0]


def test_large_values_go_both_ways(ranks: SpawnedRanks) -> None:
    x = torch.full((50, 10_000), 3.0)
    assert torch.equal(ranks.run(step(**_healthy(x))), torch.full((150, 10_000), 6.0))


def test_workers_are_interpreters_of_their_own(ranks: SpawnedRanks) -> None:
    """No module of ours that they do not need; the tables that came; their share of the cores."""
    found = ranks.run(step(**_healthy(torch.tensor([4, 5])))).tolist()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert found == [[0, 0, 0, threads, rank, 5, 10] for rank in range(2)]


def test_weights_are_there_and_can_be_had_back(ranks: SpawnedRanks) -> None:
    for rank in range(2):
        assert torch.equal(ranks.parameter(rank, "weight"), VALUES[3 * rank : 3 * rank + 3])


def test_weights_lie_in_memory_that_has_no_name(ranks: SpawnedRanks) -> None:
    for pid in ranks.processes:
        assert "/memfd:tpcompile-weights (deleted)" in Path(f"/proc/{pid}/maps").read_text()
    assert not any("tpcompile-weights" in file for file in _files())


def test_callers_of_several_threads_take_turns(ranks: SpawnedRanks) -> None:
    found: dict[int, float] = {}

    def call(number: int) -> None:
        for _ in range(5):
            x = torch.full((1, 4), float(number))
            found[number] = float(ranks.run(step(**_healthy(x)))[0, 0])

    callers = [threading.Thread(target=call, args=(number,)) for number in range(1, 5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == {number: 2.0 * number for number in range(1, 5)}


def test_what_cannot_be_sent_does_not_end_the_ranks(ranks: SpawnedRanks) -> None:
    with pytest.raises(KeyError, match="positions"):
        ranks.run(step(x=torch.ones(1, 1)))
    assert ranks.closed == ""


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (0, r"(?s)Rank 1 raised ValueError: this rank fails.*in forward.*raise ValueError"),
        (1, "Rank 1 was killed by signal SIGKILL"),
        (3, r"(?s)Rank 1 ended with status 7.*something odd"),
        (4, r"(?s)Rank 1 was killed by signal SIGBUS.*may have become shorter"),
    ],
    ids=["raises", "killed", "exits", "loses a file that it has mapped"],
)
def test_a_rank_that_fails_is_named(act: int, message: str) -> None:
    """Also to later callers; and the next ranks work, and nothing stays behind."""
    before = _files()
    ranks = _spawn()
    pids = ranks.processes
    assert ranks.run(step(x=torch.tensor([9, 9]))).tolist() == [18, 18]
    with _in_time(), pytest.raises(RankError, match=message):
        ranks.run(step(x=torch.tensor([1, act])))
    assert _gone(pids, 0.0)
    assert _only(before)
    with pytest.raises(UsageError, match=r"The model is closed: rank 1 .*Compile it again"):
        ranks.run(step(x=torch.tensor([9, 9])))
    ranks.close()


def test_a_rank_killed_between_steps_is_named() -> None:
    ranks = _spawn()
    os.kill(ranks.processes[0], signal.SIGKILL)
    with _in_time(), pytest.raises(RankError, match="Rank 0 was killed by signal SIGKILL"):
        ranks.run(step(x=torch.tensor([9, 9])))


def test_a_rank_that_hangs_is_told_with_its_stack() -> None:
    ranks = _spawn()
    _soon_silent(ranks)
    with _in_time(), pytest.raises(RankError, match=f"{SILENCE_S:g} s") as caught:
        ranks.run(step(x=torch.tensor([1, 2])))
    first, _, second = caught.value.got.partition("rank 1 in:")
    assert "process_group.py" in first  # rank 0 waits for the other
    assert "forward" in second
    assert "process_group.py" not in second
    assert ranks.closed


def test_a_stopped_rank_is_the_one_that_is_named() -> None:
    ranks = _spawn()
    _soon_silent(ranks)
    pids = ranks.processes
    os.kill(pids[1], signal.SIGSTOP)
    message = rf"^Rank 1 did not answer for {SILENCE_S:g} s"
    with _in_time(), pytest.raises(RankError, match=message):
        ranks.run(step(x=torch.tensor([9, 9])))
    assert _gone(pids, 0.0)


def test_a_rank_that_loses_another_is_not_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 tells that a rank is gone before the end of rank 1 is seen."""
    who_speaks = Workers._who_speaks
    rank_0_has_spoken = False

    def rank_0_first(self: Workers, seconds: float) -> list[WorkerProcess]:
        nonlocal rank_0_has_spoken
        while not rank_0_has_spoken:
            spoke = [worker for worker in who_speaks(self, seconds) if worker.rank == 0]
            if spoke:
                rank_0_has_spoken = True
                return spoke
        return who_speaks(self, seconds)

    ranks = _spawn()
    monkeypatch.setattr(Workers, "_who_speaks", rank_0_first)
    with _in_time(), pytest.raises(RankError, match="Rank 1 was killed"):
        ranks.run(step(x=torch.tensor([1, 1])))
    assert rank_0_has_spoken


def test_ctrl_c_ends_the_workers_and_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _spawn(tp=1)
    pids = ranks.processes
    os.kill(pids[0], signal.SIGINT)  # what a terminal does to all of a job
    assert ranks.run(step(x=torch.tensor([9, 9]))).tolist() == [9, 9]
    main = threading.main_thread().ident
    assert main is not None
    who_speaks = Workers._who_speaks

    def interrupted(self: Workers, seconds: float) -> list[WorkerProcess]:
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        return who_speaks(self, seconds)

    monkeypatch.setattr(Workers, "_who_speaks", interrupted)  # the step has been sent by then
    with _in_time(), pytest.raises(KeyboardInterrupt):
        ranks.run(step(x=torch.tensor([0, 2])))
    assert _gone(pids, 0.0)
    with pytest.raises(UsageError, match="KeyboardInterrupt"):
        ranks.run(step(x=torch.tensor([9, 9])))


def _checkpoint(directory: Path, rows: int = 6) -> CheckpointFiles:
    save_file({WEIGHT.name: torch.arange(4.0 * rows).view(rows, 4)}, directory / SINGLE)
    return CheckpointFiles(directory, {WEIGHT.name: WEIGHT}, {})


def test_checkpoints_are_read_by_the_workers(tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    ranks = SpawnedRanks(2)
    ranks.load(
        programs(2, parameters=halves()),
        _checkpoint(tmp_path),
        Doubled,
        lambda done, of: shown.append((done, of)),
    )
    assert shown == [(1, 2), (2, 2)]
    assert torch.equal(ranks.parameter(1, "weight"), VALUES[3:])
    ranks.close()
    assert ranks.closed == "The model is closed"


def test_a_fault_of_a_checkpoint_is_of_its_own_class(tmp_path: Path) -> None:
    ranks = SpawnedRanks(1)
    pids = ranks.processes
    with pytest.raises(CheckpointError, match="another shape") as caught:
        ranks.load(programs(1, parameters=halves()[:1]), _checkpoint(tmp_path, rows=5), Doubled)
    assert caught.value.where.startswith("rank 0, ")
    assert caught.value.expected == "(6, 4)"
    assert _gone(pids, 0.0)


def test_a_fault_of_the_source_in_memory_ends_the_workers() -> None:
    def failing(name: str, index: tuple[slice, ...]) -> torch.Tensor:
        raise OSError(5, "the disk is gone")

    before = _files()
    ranks = SpawnedRanks(1)
    pids = ranks.processes
    with pytest.raises(OSError, match="the disk is gone"):
        ranks.load(programs(1, parameters=halves()[:1]), failing, Doubled)
    assert _gone(pids, 0.0)
    assert _only(before)


def test_ranks_must_be_loaded_before_they_run() -> None:
    ranks = SpawnedRanks(1)
    with pytest.raises(UsageError, match="not loaded"):
        ranks.run(step(x=torch.ones(1)))
    pids = ranks.processes
    del ranks  # nobody closes it
    assert _gone(pids, 0.0)


_SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
with open({log!r}, "a") as log:
    log.write("main ran\\n")
import torch
from tests import launches
from tests.runtime.ranks.tiny_ranks import Doubled, programs, step
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.ranks import launcher
from tpcompile.runtime.ranks.spawned import SpawnedRanks

ranks = SpawnedRanks(2)
ranks.load(programs(2, {body!r}), None, Doubled)
total = ranks.run(step(x=torch.tensor([9, 9])))[0].item()
print(*ranks.processes, total, flush=True)
{end}
"""


def _run_script(
    tmp_path: Path, end: str, then: Callable[[subprocess.Popen[str], list[int]], object]
) -> None:
    log = tmp_path / "log"
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(root=str(ROOT), log=str(log), body=ACTS, end=end))
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        *named, total = line.split() or pytest.fail(process.stderr.read())
        assert total == "18"
        pids = [int(pid) for pid in named]
        then(process, pids)
        process.wait(60)
        assert _gone(pids, 60)
        assert process.stderr.read() == ""
    assert log.read_text() == "main ran\n"


def test_a_killed_parent_leaves_no_worker(tmp_path: Path) -> None:
    """Not even one that is busy, as rank 1 is, or one that is stopped."""

    def stop_and_kill(process: subprocess.Popen[str], pids: list[int]) -> None:
        time.sleep(0.3)
        os.kill(pids[0], signal.SIGSTOP)
        process.kill()

    _run_script(tmp_path, "ranks.run(step(x=torch.tensor([1, 2])))", stop_and_kill)


def test_a_killed_parent_leaves_no_worker_though_it_had_forked(tmp_path: Path) -> None:
    """The fork holds all that the parent held, the lifeline too, and longer than they may live."""
    end = """
forked = os.fork()
if not forked:
    time.sleep(120)
    os._exit(0)
print(forked, flush=True)
time.sleep(100)"""

    def kill(process: subprocess.Popen[str], pids: list[int]) -> None:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        process.kill()
        try:
            assert _gone(pids, 60)
        finally:
            os.kill(fork, signal.SIGKILL)

    _run_script(tmp_path, end, kill)


def test_leaving_a_script_ends_the_workers(tmp_path: Path) -> None:
    """And a fork that leaves does not end those of its parent."""
    end = """
if os.fork() == 0:
    sys.exit()
os.wait()
assert ranks.run(step(x=torch.tensor([9, 9]))).tolist() == [18, 18]
sys.exit(3)"""
    _run_script(tmp_path, end, lambda process, pids: None)
