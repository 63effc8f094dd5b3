"""Workers end when their script ends, for any reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.ranks.left_behind import gone
from tests.runtime.ranks.tiny_ranks import ACTS

ROOT = Path(__file__).parents[3]

_SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
with open({log!r}, "a") as log:
    log.write("main ran\\n")
import torch
from tests import launches
from tests.runtime.ranks.tiny_ranks import Doubled, modules, step
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.ranks import launcher
from tpcompile.runtime.ranks.spawned import SpawnedRanks

ranks = SpawnedRanks(2)
ranks.load(modules(2, {body!r}), None, Doubled)
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
        assert gone(pids, 60)
        assert process.stderr.read() == ""
    assert log.read_text() == "main ran\n"


def test_a_killed_parent_leaves_no_worker(tmp_path: Path) -> None:
    """Workers of a killed parent end, even if one is busy or stopped."""

    def stop_and_kill(process: subprocess.Popen[str], pids: list[int]) -> None:
        time.sleep(0.3)
        os.kill(pids[0], signal.SIGSTOP)
        process.kill()

    _run_script(tmp_path, "ranks.run(step(x=torch.tensor([1, 2])))", stop_and_kill)


def test_a_killed_parent_leaves_no_worker_though_it_had_forked(tmp_path: Path) -> None:
    """Workers end although a fork of the killed parent still holds all its files."""
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
            assert gone(pids, 60)
        finally:
            os.kill(fork, signal.SIGKILL)

    _run_script(tmp_path, end, kill)


def test_leaving_a_script_ends_the_workers(tmp_path: Path) -> None:
    """Workers end when the script exits, but not when a fork of it exits."""
    end = """
if os.fork() == 0:
    sys.exit()
os.wait()
assert ranks.run(step(x=torch.tensor([9, 9]))).tolist() == [18, 18]
sys.exit(3)"""
    _run_script(tmp_path, end, lambda process, pids: None)
