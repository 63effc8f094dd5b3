"""Ranks that a script starts work, report failures by rank, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import launches
from tests.runtime.ranks.left_behind import gone, in_time, only_files, own_files, until
from tests.runtime.ranks.tiny_ranks import ACTS, WEIGHT, Doubled, halves, modules, step
from tpcompile.checkpoint_files import SINGLE
from tpcompile.cores import threads_of
from tpcompile.errors import CheckpointError, RankError, UsageError
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.ranks import launcher
from tpcompile.runtime.ranks.channel import Channel
from tpcompile.runtime.ranks.spawned import SpawnedRanks
from tpcompile.runtime.ranks.worker_process import WorkerProcess
from tpcompile.runtime.ranks.workers import Workers

ROOT = Path(__file__).parents[3]
VALUES = torch.arange(24.0).view(6, 4)
SILENCE_S = 5.0
"""The timeout of tests that wait for it."""


def read(name: str, index: tuple[slice, ...]) -> torch.Tensor:
    assert name == WEIGHT.name
    return VALUES[index]


def _spawn(body: str = ACTS, tp: int = 2) -> SpawnedRanks:
    ranks = SpawnedRanks(tp)
    ranks.load(modules(tp, body), read, Doubled)
    return ranks


def _soon_silent(ranks: SpawnedRanks) -> None:
    """Shorten the timeout after starting and loading, which may take long on a busy machine."""
    ranks._workers._timeout = SILENCE_S


@pytest.fixture(autouse=True)
def _forked_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks that tests start themselves; the `ranks` fixture starts ordinary ones."""
    launches.ready()
    monkeypatch.setattr(launcher, "start_process", launches.start_forked)


@pytest.fixture(scope="module")
def ranks() -> Iterator[SpawnedRanks]:
    """Provide two healthy ranks with half of a weight each, loaded from memory."""
    body = """
        if x.dim() == 2:
            return torch.cat([self.group.all_reduce(x)] * int(x[0, 0]))
        if len(x) == 3:
            return torch.tensor([RANK])
        cos, sin = self.rotary(x, 3, torch.bfloat16)
        imported = [name in sys.modules for name in ("transformers", "pytest", "tests")]
        state = [*imported, torch.get_num_threads(), RANK, int(cos[1, 0]), int(sin[1, 0])]
        return self.group.all_gather(torch.tensor([state]), 0, (1, 1))"""
    shown: list[tuple[int, int]] = []
    started: list[SpawnedRanks] = []

    def make() -> None:
        started.append(SpawnedRanks(2))
        started[0].load(
            modules(
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
    assert until(lambda: not Path(f"/proc/self/task/{maker.native_id}").exists())
    assert shown == [(1, 2), (2, 2)]
    yield started[0]
    started[0].close()


def _healthy(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": x, "positions": torch.tensor([4, 5])}


def test_ranks_outlive_the_thread_that_made_them(ranks: SpawnedRanks) -> None:
    """Workers survive the thread that started them, which the system considers their parent."""
    assert all(Path(f"/proc/{pid}").exists() for pid in ranks.processes)
    x = torch.ones(1, 1)
    assert torch.equal(ranks.run(step(**_healthy(x))), x + x)


def test_ranks_work_together(ranks: SpawnedRanks) -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert torch.equal(ranks.run(step(**_healthy(x))), x + x)


def test_every_rank_can_be_asked(ranks: SpawnedRanks) -> None:
    """Each rank can return its own result, and afterwards ordinary calls work again."""
    x = torch.tensor([4, 5, 0])
    outputs = ranks.run_all(step(**_healthy(x)))
    assert [result.tolist() for result in outputs] == [[0], [1]]
    assert ranks.run(step(**_healthy(x))).tolist() == [0]


def test_large_values_go_both_ways(ranks: SpawnedRanks) -> None:
    x = torch.full((50, 10_000), 3.0)
    assert torch.equal(ranks.run(step(**_healthy(x))), torch.full((150, 10_000), 6.0))


def test_workers_are_interpreters_of_their_own(ranks: SpawnedRanks) -> None:
    """Workers import only needed modules, have the given tables, and use their share of cores."""
    states = ranks.run(step(**_healthy(torch.tensor([4, 5])))).tolist()
    threads = threads_of(2)
    assert states == [[0, 0, 0, threads, rank, 5, 10] for rank in range(2)]


def test_weights_are_there_and_can_be_had_back(ranks: SpawnedRanks) -> None:
    for rank in range(2):
        assert torch.equal(ranks.parameter(rank, "weight"), VALUES[3 * rank : 3 * rank + 3])


def test_the_memory_that_weights_are_sent_in_is_freed(ranks: SpawnedRanks) -> None:
    for pid in ranks.processes:
        assert "tpcompile-weights" not in Path(f"/proc/{pid}/maps").read_text()
    assert not any("tpcompile-weights" in file for file in own_files())


def test_callers_of_several_threads_take_turns(ranks: SpawnedRanks) -> None:
    outputs: dict[int, float] = {}

    def call(number: int) -> None:
        for _ in range(5):
            x = torch.full((1, 4), float(number))
            outputs[number] = float(ranks.run(step(**_healthy(x)))[0, 0])

    callers = [threading.Thread(target=call, args=(number,)) for number in range(1, 5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert outputs == {number: 2.0 * number for number in range(1, 5)}


def test_what_cannot_be_sent_does_not_end_the_ranks(ranks: SpawnedRanks) -> None:
    with pytest.raises(KeyError, match="positions"):
        ranks.run(step(x=torch.ones(1, 1)))
    assert ranks.closed == ""


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (0, r"(?s)Rank 1 raised ValueError: this rank fails.*in forward.*raise ValueError"),
        (1, "Rank 1 was killed by signal SIGKILL"),
        (3, r"(?s)Rank 1 exited with status 7.*something odd"),
        (4, r"(?s)Rank 1 was killed by signal SIGBUS.*may have been truncated"),
    ],
    ids=["raises", "killed", "exits", "mapped file truncated"],
)
def test_a_rank_that_fails_is_named(act: int, message: str) -> None:
    """Later callers get the error too, new ranks work, and nothing is left behind."""
    before = own_files()
    ranks = _spawn()
    pids = ranks.processes
    assert ranks.run(step(x=torch.tensor([9, 9]))).tolist() == [18, 18]
    with in_time(), pytest.raises(RankError, match=message):
        ranks.run(step(x=torch.tensor([1, act])))
    assert gone(pids, 0.0)
    assert only_files(before)
    with pytest.raises(UsageError, match=r"The model is closed: rank 1 .*Compile it again"):
        ranks.run(step(x=torch.tensor([9, 9])))
    ranks.close()


def test_a_rank_killed_between_steps_is_named() -> None:
    ranks = _spawn()
    os.kill(ranks.processes[0], signal.SIGKILL)
    with in_time(), pytest.raises(RankError, match="Rank 0 was killed by signal SIGKILL"):
        ranks.run(step(x=torch.tensor([9, 9])))


def test_a_rank_that_hangs_is_told_with_its_stack() -> None:
    ranks = _spawn()
    _soon_silent(ranks)
    with in_time(), pytest.raises(RankError, match=f"{SILENCE_S:g} s") as caught:
        ranks.run(step(x=torch.tensor([1, 2])))
    first, _, second = caught.value.got.partition("rank 1 at:")
    assert "process_group.py" in first  # rank 0 waits for rank 1
    assert "forward" in second
    assert "process_group.py" not in second
    assert ranks.closed


def test_a_rank_that_takes_no_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(channel: Channel, file: int) -> None:
        raise TimeoutError

    ranks = _spawn()
    monkeypatch.setattr(Channel, "send_file", blocked)
    with pytest.raises(RankError, match="Rank 1 did not answer"):
        ranks._workers.send_file(1, 0)
    ranks.close()


def test_a_stopped_rank_is_the_one_that_is_named() -> None:
    ranks = _spawn()
    _soon_silent(ranks)
    pids = ranks.processes
    os.kill(pids[1], signal.SIGSTOP)
    message = rf"^Rank 1 did not answer for {SILENCE_S:g} s"
    with in_time(), pytest.raises(RankError, match=message):
        ranks.run(step(x=torch.tensor([9, 9])))
    assert gone(pids, 0.0)


def test_a_rank_that_loses_another_is_not_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failing rank is named, even if rank 0 reports the lost connection first."""
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
    with in_time(), pytest.raises(RankError, match="Rank 1 was killed"):
        ranks.run(step(x=torch.tensor([1, 1])))
    assert rank_0_has_spoken


def test_ctrl_c_ends_the_workers_and_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _spawn(tp=1)
    pids = ranks.processes
    os.kill(pids[0], signal.SIGINT)  # as a terminal does to all processes of a job
    assert ranks.run(step(x=torch.tensor([9, 9]))).tolist() == [9, 9]
    main = threading.main_thread().ident
    assert main is not None
    who_speaks = Workers._who_speaks

    def interrupted(self: Workers, seconds: float) -> list[WorkerProcess]:
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        return who_speaks(self, seconds)

    monkeypatch.setattr(Workers, "_who_speaks", interrupted)  # after the step has been sent
    with in_time(), pytest.raises(KeyboardInterrupt):
        ranks.run(step(x=torch.tensor([0, 2])))
    assert gone(pids, 0.0)
    with pytest.raises(UsageError, match="KeyboardInterrupt"):
        ranks.run(step(x=torch.tensor([9, 9])))


def _checkpoint(directory: Path, rows: int = 6) -> CheckpointFiles:
    save_file({WEIGHT.name: torch.arange(4.0 * rows).view(rows, 4)}, directory / SINGLE)
    return CheckpointFiles(directory, {WEIGHT.name: WEIGHT}, {})


def test_checkpoints_are_read_by_the_workers(tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    ranks = SpawnedRanks(2)
    ranks.load(
        modules(2, parameters=halves()),
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
    with pytest.raises(CheckpointError, match="does not match the configuration") as caught:
        ranks.load(modules(1, parameters=halves()[:1]), _checkpoint(tmp_path, rows=5), Doubled)
    assert caught.value.where.startswith("rank 0, ")
    assert caught.value.expected == "(6, 4)"
    assert gone(pids, 0.0)


def test_a_fault_of_the_source_in_memory_ends_the_workers() -> None:
    def failing(name: str, index: tuple[slice, ...]) -> torch.Tensor:
        raise OSError(5, "the disk is gone")

    before = own_files()
    ranks = SpawnedRanks(1)
    pids = ranks.processes
    with pytest.raises(OSError, match="the disk is gone"):
        ranks.load(modules(1, parameters=halves()[:1]), failing, Doubled)
    assert gone(pids, 0.0)
    assert only_files(before)


def test_ranks_must_be_loaded_before_they_run() -> None:
    ranks = SpawnedRanks(1)
    with pytest.raises(UsageError, match="not loaded"):
        ranks.run(step(x=torch.ones(1)))
    pids = ranks.processes
    del ranks  # without close()
    assert gone(pids, 0.0)
