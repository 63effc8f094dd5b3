"""The parent's handle to the interpreter from which workers are forked."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from tpcompile.errors import RankError
from tpcompile.runtime.ranks.channel import Channel
from tpcompile.runtime.ranks.descriptors import nameless_file, socket_pair
from tpcompile.runtime.ranks.worker_process import WorkerProcess
from tpcompile.runtime.ranks.worker_start import END, NUMBER, RUNNING, STACK_SIGNAL, Files, files_of

_START = """\
import sys
sys.path[:] = {path!r}
from tpcompile.runtime.ranks.worker_start import main
main({parent}, {control}, {lifeline}, {threads}, {ranks})
"""
_ENDING_S = 5.0
"""The limit for a process to end or a launcher to answer; both usually take much less."""
_STACK_S = 3.0


class Launcher:
    """A fresh interpreter that imports the workers' modules and then forks into workers.

    It can import the modules of its parent, but never runs the parent's main module. Importing
    torch takes seconds of CPU time and 100 MB of memory, which the workers share. The process
    lives until all workers end, because only their parent can report how each of them ended.
    """

    def __init__(self, tp: int, lifeline: int, threads: int) -> None:
        self.workers: list[WorkerProcess] = []
        self._pids: Sequence[int] = ()
        self._control, control = socket_pair()
        with ExitStack() as worker_ends, ExitStack() as on_failure:
            worker_ends.enter_context(control)
            on_failure.callback(self._close)
            ranks: list[Files] = []
            for rank in range(tp):
                parent_end, worker_end = socket_pair()
                worker_ends.enter_context(worker_end)
                errors, stacks = (open(nameless_file(), "rb") for _ in range(2))  # noqa: SIM115
                self.workers.append(WorkerProcess(rank, Channel(parent_end), errors, stacks))
                ranks.append((worker_end.fileno(), errors.fileno(), stacks.fileno()))
            self._process = start_process(control.fileno(), lifeline, threads, ranks)
            on_failure.pop_all()

    def pids(self, seconds: float) -> Sequence[int]:
        """Return the workers' process ids by rank; empty if they do not start within `seconds`."""
        if not self._pids:
            pids = struct.Struct(f"{len(self.workers)}i")
            with contextlib.suppress(OSError):
                self._control.settimeout(seconds)
                sent = self._control.recv(pids.size, socket.MSG_WAITALL)
                if sent:
                    self._pids = pids.unpack(sent)
        return self._pids

    def death(self, rank: int) -> RankError:
        """Return the error for an ended worker; before the fork, the launcher's, as rank 0."""
        until = time.monotonic() + _ENDING_S
        while (status := self._status(rank)) == RUNNING and time.monotonic() < until:
            time.sleep(0.01)
        worker = self.workers[rank if self.pids(0.0) else 0]
        return worker.death(None if status == RUNNING else status)

    def _status(self, rank: int) -> int:
        """Return the exit status of a worker, negative for a signal.

        No worker outlives the launcher. If it has ended, its own status is returned.
        """
        try:
            if self.pids(0.0):
                self._control.settimeout(_ENDING_S)
                self._control.sendall(NUMBER.pack(rank))
                (status,) = NUMBER.unpack(self._control.recv(NUMBER.size, socket.MSG_WAITALL))
                return int(status)
        except (OSError, struct.error):
            pass  # the launcher has ended or is stopped
        status = self._process.poll()
        return RUNNING if status is None else status

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the stack of each worker; empty for a worker that does not react to the signal."""
        pids = self.pids(0.0)
        workers = {rank: self.workers[rank if pids else 0] for rank in ranks}
        starts = {rank: worker.size_of_stacks() for rank, worker in workers.items()}
        for pid in {pids[rank] for rank in ranks} if pids else {self._process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
        until = time.monotonic() + _STACK_S
        while True:
            time.sleep(0.05)
            stacks = {rank: worker.stack_since(starts[rank]) for rank, worker in workers.items()}
            if all(stacks.values()) or time.monotonic() > until:
                return stacks

    def end(self) -> None:
        """End all workers, which have no state to save, and then the launcher."""
        try:
            if not self.pids(0.0):
                self._process.kill()
            self._control.sendall(NUMBER.pack(END))
            self._process.wait(_ENDING_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
        self._process.wait()
        self._close()

    def disown(self) -> None:
        """Close all files in a fork of the parent; the launcher is not a child of the fork."""
        self._process.poll()  # finds no such child, so that Popen does not wait for it
        self._close()

    def _close(self) -> None:
        self._control.close()
        for worker in self.workers:
            worker.close()


def start_process(
    control: int, lifeline: int, threads: int, ranks: Sequence[Files]
) -> subprocess.Popen[bytes]:
    """Start the interpreter; until the fork, it writes to the output file of rank 0."""
    start = _START.format(
        path=[entry for entry in sys.path if isinstance(entry, str)],
        parent=os.getpid(),
        control=control,
        lifeline=lifeline,
        threads=threads,
        ranks=ranks,
    )
    return subprocess.Popen(
        [_interpreter(), "-c", start],
        stdin=subprocess.DEVNULL,
        stdout=ranks[0][1],
        stderr=ranks[0][1],
        pass_fds=[control, lifeline, *files_of(ranks)],
    )


def _interpreter() -> str:
    if not sys.executable:
        raise RankError(
            "The ranks cannot be started: sys.executable is not set in this Python",
            hint="Use simulate=True to run all ranks in this process",
        )
    return sys.executable
