"""Start launchers as forks of a process that has already imported torch and models.

For tests whose subject is not the start of workers: the import takes seconds. The launcher then
behaves as usual: it forks the workers, answers for them, and exits with them.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any

from tpcompile.runtime.ranks.worker_start import Files, main

ready = forkserver.ensure_running
"""Start the fork server, which keeps files open in this process."""


def stop() -> None:
    """Stop the fork server and wait for it, so that its CPU time is counted for the tests."""
    server: Any = vars(forkserver)["_forkserver"]
    server._stop()


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tpcompile.runtime.ranks.worker",
        "tpcompile.runtime.model",
        "tpcompile.demo.model",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)


class File:
    """Open file to pass to a new process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (DupFd(self.number),)


def _opened(file: Any) -> File:
    return File(file.detach())


class Forked:
    """Process of the fork server, with the interface of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self._status: int | None = None
        self.pid = process.pid

    def poll(self) -> int | None:
        if self._status is None and self._process.exitcode is not None:
            self._status = self._process.exitcode
            self._process.close()
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a launcher", timeout or 0.0)
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        if self._status is None:
            self._process.kill()


def start_forked(control: int, lifeline: int, threads: int, ranks: Sequence[Files]) -> Forked:
    """Do what `tpcompile.runtime.ranks.launcher.start_process` does, without the import."""
    files = [[File(file) for file in rank_files] for rank_files in ranks]
    process = CONTEXT.Process(
        target=_launch, args=(File(control), File(lifeline), threads, files), daemon=True
    )
    process.start()
    return Forked(process)


def _launch(control: File, lifeline: File, threads: int, ranks: Sequence[Sequence[File]]) -> None:
    numbers = [
        (connection.number, output.number, stacks.number) for connection, output, stacks in ranks
    ]
    main(os.getppid(), control.number, lifeline.number, threads, numbers)
