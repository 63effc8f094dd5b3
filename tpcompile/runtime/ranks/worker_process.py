"""A worker as its parent sees it: a process, the channel to it, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO

from tpcompile.errors import RankError
from tpcompile.runtime.ranks.channel import Channel
from tpcompile.runtime.ranks.descriptors import nameless_file, socket_pair
from tpcompile.runtime.ranks.worker_start import STACK_SIGNAL

_START = """\
import sys
sys.path[:] = {path!r}
from tpcompile.runtime.ranks.worker_start import main
main({parent}, {rank}, {connection}, {lifeline}, {stacks}, {threads})
"""
_WHY: dict[int, str] = {
    signal.SIGKILL: "The system kills processes when memory runs out: see its log",
    signal.SIGBUS: "A file that it read may have become shorter, or a disk may be full or broken",
}
"""What the system may mean by a signal."""
_DYING_S = 5.0
_STACK_S = 3.0
_TAIL = 3000


class WorkerProcess:
    """A fresh interpreter: it knows the modules of its parent, but nothing of its main module."""

    def __init__(self, rank: int, lifeline: int, threads: int) -> None:
        self.rank = rank
        self._errors: IO[bytes] = open(nameless_file(), "rb")  # noqa: SIM115 - see `_close`
        self._stacks: IO[bytes] = open(nameless_file(), "rb")  # noqa: SIM115 - see `_close`
        own, other = socket_pair()
        self.channel = Channel(own)
        with other:
            files = {
                "connection": other.fileno(),
                "lifeline": lifeline,
                "stacks": self._stacks.fileno(),
            }
            path = [entry for entry in sys.path if isinstance(entry, str)]
            start = _START.format(
                path=path, parent=os.getpid(), rank=rank, threads=threads, **files
            )
            try:
                self._process = subprocess.Popen(
                    [_interpreter(), "-c", start],
                    stdin=subprocess.DEVNULL,
                    stdout=self._errors,
                    stderr=self._errors,
                    pass_fds=list(files.values()),
                )
            except BaseException:
                self._close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def death(self) -> RankError:
        """Why the process is gone, or about to go: its connection is closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING_S)
        status = self._process.returncode
        if status is None:
            return RankError(f"Rank {self.rank} closed its connection and did not end")
        hint = ""
        if status < 0:
            how = f"was killed by signal {signal.Signals(-status).name}"
            hint = _WHY.get(-status, "")
        else:
            how = f"ended with status {status}"
        said = self._said()
        got = f"what it last printed:\n{said}\n" if said else ""
        return RankError(f"Rank {self.rank} {how}", got=got, hint=hint)

    def kill(self) -> None:
        """End the process, which has nothing to save; `bury` it then."""
        if self.alive():
            self._process.kill()

    def bury(self) -> None:
        """Reap the process and close all files."""
        self._process.wait()
        self._close()

    def disown(self) -> None:
        """Close all files in a fork of the parent, whose child the process is not."""
        self._process.poll()  # finds no such child, and notes that there is none to wait for
        self._close()

    def ask_for_stack(self) -> int:
        """Where in the file of stacks the answer will begin."""
        size = os.fstat(self._stacks.fileno()).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)
        return size

    def stack_since(self, start: int) -> str:
        length = os.fstat(self._stacks.fileno()).st_size - start
        return os.pread(self._stacks.fileno(), length, start).decode(errors="replace").strip()

    def _said(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        start = max(size - _TAIL, 0)
        return os.pread(self._errors.fileno(), _TAIL, start).decode(errors="replace").strip()

    def _close(self) -> None:
        self.channel.close()
        self._errors.close()
        self._stacks.close()


def stacks_of(workers: Sequence[WorkerProcess]) -> dict[int, str]:
    """Where each worker is; empty for one that does not even react to a signal."""
    starts = [worker.ask_for_stack() for worker in workers]
    until = time.monotonic() + _STACK_S
    while True:
        time.sleep(0.05)
        found = {
            worker.rank: worker.stack_since(start)
            for worker, start in zip(workers, starts, strict=True)
        }
        if all(found.values()) or time.monotonic() > until:
            return found


def _interpreter() -> str:
    if not sys.executable:
        raise RankError(
            "The ranks cannot be started: this Python does not know its own executable",
            hint="Use simulate=True to keep all ranks in this process",
        )
    return sys.executable
