"""Ranks started by a launcher find each other, or report why they cannot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests import scripts
from tests.runtime.ranks.left_behind import FAULT_S
from tests.runtime.ranks.tiny_ranks import Doubled, modules
from tpcompile.backends.torch_tp import Storage
from tpcompile.errors import CheckpointError, RankError, UsageError
from tpcompile.ir.recipe import Tensor
from tpcompile.runtime.ranks import joined, launched
from tpcompile.runtime.ranks.joined import JoinedRanks
from tpcompile.runtime.ranks.launched import find_group
from tpcompile.runtime.ranks.owner import Owner
from tpcompile.runtime.ranks.rank import LocalParameter

ROOT = Path(__file__).parents[3]
SCRIPT_S = 300
"""Far more than a script takes, since interpreters start slowly on a busy machine."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def _port(listening: bool) -> Iterator[int]:
    """Yield a local port that is either in use or free."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listening:
            taken.listen()
        yield taken.getsockname()[1]


def _launched(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, port: int) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_a_plain_script_belongs_to_no_group() -> None:
    assert find_group(2, CPU) is None
    assert not dist.is_initialized()


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with _port(listening=False) as port:
        pass
    _launched(monkeypatch, 0, 1, port)
    with pytest.raises(UsageError, match=r"tp=3\. Found 1\..*--nproc-per-node 3.*tp=1"):
        find_group(3, CPU)
    assert not dist.is_initialized()


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with _port(listening=True) as port:
        _launched(monkeypatch, 0, 1, port)
        with pytest.raises(RankError, match=rf"127\.0\.0\.1:{port}.*--master-port"):
            find_group(1, CPU)
    assert not dist.is_initialized()


def test_a_master_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with _port(listening=False) as port:
        _launched(monkeypatch, 1, 2, port)
        start = time.monotonic()
        with pytest.raises(RankError, match=rf"127\.0\.0\.1:{port}.*All ranks must reach the host"):
            find_group(2, CPU, meeting=1.0)
    assert time.monotonic() - start < FAULT_S
    assert not dist.is_initialized()


def test_there_are_no_ranks_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with _port(listening=False) as port:
        pass
    _launched(monkeypatch, 0, 1, port)
    with pytest.raises(UsageError, match="meta"):
        find_group(1, torch.device("meta"))


def _alone(body: str) -> JoinedRanks:
    """Return a manually created group of one rank."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, dist.default_pg_timeout)
    return JoinedRanks(modules(1, body), lambda name, index: torch.ones(1), Doubled, group, CPU)


def test_a_rank_that_raises_is_closed() -> None:
    from tests.runtime.ranks.tiny_ranks import step

    ranks = _alone("raise ValueError('this rank fails')")
    with pytest.raises(RankError, match=r"(?s)Rank 0 raised ValueError: this rank fails"):
        ranks.run(step(x=torch.ones(1)))
    with pytest.raises(UsageError, match="closed: rank 0 raised ValueError"):
        ranks.run(step(x=torch.ones(1)))


def test_a_closed_rank_says_so() -> None:
    ranks = _alone("return x")
    assert ranks.closed == ""
    ranks.close()
    for call in (lambda: ranks.parameter(0, "weight"), ranks.agree):
        with pytest.raises(UsageError, match=r"The model is closed. Compile it again"):
            call()


def test_a_fault_of_the_weights_is_of_its_own_class() -> None:
    def missing(name: str, index: tuple[slice, ...]) -> torch.Tensor:
        raise CheckpointError(f"The model has no tensor {name}")

    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, dist.default_pg_timeout)
    parameters = [
        {"weight": LocalParameter(Tensor("model.weight", (2,)), torch.float32, Storage.ROWS)}
    ]
    with pytest.raises(CheckpointError, match=r"model\.weight"):
        JoinedRanks(modules(1, parameters=parameters), missing, Doubled, group, CPU)


_SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from tests.runtime.ranks.tiny_ranks import Doubled, halves, modules, step
from tpcompile.errors import CompileError, UsageError
from tpcompile.runtime.ranks import joined, launched
from tpcompile.runtime.ranks.joined import JoinedRanks
from tpcompile.runtime.ranks.launched import find_group
from tpcompile.runtime.ranks.owner import Owner

{before}
cpu = torch.device("cpu")
group = find_group(2, cpu)
values = torch.arange(24.0).view(6, 4)
sharded = modules(2, "return self.group.all_reduce(x * (RANK + 1.0))", parameters=halves())
ranks = JoinedRanks(sharded, lambda name, index: values[index], Doubled, group, cpu)
alone = modules(2, "return x * (RANK + 1.0)")
itself = JoinedRanks(alone, lambda name, index: values, Doubled, group, cpu)
x = step(x=torch.tensor([1.0]))
torch.manual_seed(group.rank())
ranks.agree()
answers = dict(
    sum=ranks.run(x).item(),
    weights=torch.cat([ranks.parameter(r, "weight") for r in (0, 1)]).equal(values),
    drawn=torch.randint(1000, (1,)).item(),
    same=ranks.broadcast(torch.tensor([group.rank()])).item(),
    all=[float(value) for value in itself.run_all(x)],
    shared=ranks._group._shared is not None,
)
sys.stdout.write(str(answers) + chr(10))  # in one piece: two ranks write
sys.stdout.flush()
{after}
"""
_EXPECTED = {"sum": 3.0, "weights": True, "same": 0, "all": [1.0, 2.0], "shared": True}
_LOSE = """
if group.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
for _ in range(2):
    try:
        ranks.run(x)
    except CompileError as error:
        print(f"{type(error).__name__} {error}".split(chr(10))[0], flush=True)
print(time.monotonic() - start < {fault_s})
"""


def _script(tmp_path: Path, before: str = "", after: str = "") -> str:
    path = tmp_path / "script.py"
    after = after.replace("{fault_s}", str(FAULT_S))
    path.write_text(_SCRIPT.format(root=str(ROOT), before=before, after=after))
    return str(path)


_DIFFER = """
try:
    ranks.run(step(x=torch.tensor([group.rank() + 1.0])))
except CompileError as error:
    print(f"{type(error).__name__} {error}", flush=True)
"""


def test_processes_that_give_other_tokens_are_told_so(tmp_path: Path) -> None:
    """Different prompts on the processes are refused, since their sums would be meaningless."""
    done = scripts.run([_script(tmp_path, after=_DIFFER)], ranks=2, timeout=SCRIPT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("UsageError Every process must call the model with the same") == 2


_FORK = """
def forked(close):
    signal.alarm(60)  # a call that hangs
    token = torch.tensor([1])
    calls = dict(
        run=lambda: ranks.run(x), all=lambda: itself.run_all(x),
        same=lambda: ranks.broadcast(token),
        parameter=lambda: ranks.parameter(0, "weight"), agree=lambda: ranks.agree(),
        find=lambda: find_group(2, torch.device("cpu")),
    )
    for name, call in calls.items():
        try:
            call()
        except UsageError as error:
            whose = "The process group" if name == "find" else "The model"
            refused = f"{whose} belongs to process {os.getppid()}; this is process {os.getpid()}"
            assert error.message.startswith(refused), error
        else:
            raise AssertionError(name)
    if close:
        ranks.close()
        itself.close()
    sys.exit(0)

right = []
for close in (False, True):
    child = os.fork()
    if child == 0:
        forked(close)
    right.append(ranks.run(x).item() == 3.0)
    right.append(os.waitpid(child, 0)[1])
sys.stdout.write(str(right) + chr(10))
"""


def test_torchrun(tmp_path: Path) -> None:
    """Ranks under torchrun work; a fork of a rank is refused, exits, and does not disturb them."""
    done = scripts.run([_script(tmp_path, after=_FORK)], ranks=2, timeout=SCRIPT_S)
    assert done.returncode == 0, done.stderr
    lines = [eval(line) for line in done.stdout.splitlines()]
    first, second = (line for line in lines if isinstance(line, dict))
    assert first == second == {**_EXPECTED, "drawn": first["drawn"]}
    assert [line for line in lines if isinstance(line, list)] == [[True, 0, True, 0]] * 2


def test_a_fork_leaves_the_group_of_its_parent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork neither waits for nor destroys the group, whose threads it does not have."""
    done: list[str] = []

    class Group:
        def wait_for_release(self) -> None:
            done.append("waited")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("left"))
    owner, group, pid = Owner(), cast(Any, Group()), os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: pid + 1)
        joined._wait_for_threads(owner, group)
        launched._leave(owner)
        assert not done
    joined._wait_for_threads(owner, group)
    launched._leave(owner)
    assert done == ["waited", "left"]


def test_a_rank_that_is_killed_is_missed_by_the_other(tmp_path: Path) -> None:
    """A killed rank is reported by the other one, also with a default group made by the script."""
    script = _script(tmp_path, "dist.init_process_group('gloo')", _LOSE)
    with _port(listening=False) as port:
        pass
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-W", "error", script],
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    second.communicate(timeout=SCRIPT_S)
    told, errors = first.communicate(timeout=SCRIPT_S)
    assert first.returncode == 0, errors
    _, lost, closed, in_time = told.splitlines()
    assert lost.startswith("PeerError The connection to another rank was lost")
    closing = "The model is closed: the connection to another rank was lost. Compile it again."
    assert closed == f"UsageError {closing}"
    assert in_time == "True"
