"""The entry point of the launcher and its workers; heavy imports are inside `main`."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence

STACK_SIGNAL = signal.SIGUSR1
"""The signal on which a worker writes its stack to a file that its parent reads."""

NUMBER = struct.Struct("i")
"""The format of messages: the parent sends a rank, and the launcher answers with its status."""
END = -1
"""The rank that requests the end of all workers and the launcher."""
RUNNING = 1000
"""The status of a worker that has not ended; exit statuses are below 256."""

_PR_SET_PDEATHSIG = 1
"""The `prctl` option of Linux that sets the signal sent when the parent ends."""
_LOOK_AGAIN = 1000
"""Milliseconds between checks of the parent, as a fork of it may hold the lifeline open."""

Files = tuple[int, int, int]
"""The descriptors of a worker: its connection, its output, and the file for its stacks."""


def main(parent: int, control: int, lifeline: int, threads: int, ranks: Sequence[Files]) -> None:
    """Import the workers' modules, fork the workers, and report on them until the parent ends."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=ranks[0][2], all_threads=False)

    from tpcompile.runtime.ranks.worker import serve

    gc.freeze()  # else each worker's first collection writes to, and so copies, all shared pages
    launcher = os.getpid()
    workers: list[int] = []
    for rank, (connection, errors, stacks) in enumerate(ranks):
        worker = os.fork()
        if worker:
            workers.append(worker)
            continue
        die_with(launcher)
        for output in (1, 2):
            os.dup2(errors, output)
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
        _close(control, *files_of([*ranks[:rank], *ranks[rank + 1 :]]))
        _watch(lifeline, launcher)
        serve(rank, connection, threads)
        return
    _close(*(connection for connection, _, _ in ranks))
    _watch(lifeline, parent)
    _answer_for(workers, socket.socket(fileno=control))


def files_of(ranks: Sequence[Files]) -> list[int]:
    """Return the descriptors of several workers."""
    return [file for files in ranks for file in files]


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


def _answer_for(workers: Sequence[int], control: socket.socket) -> None:
    """Report how workers ended; kill the others on `END` or when the parent has ended."""
    control.sendall(struct.pack(f"{len(workers)}i", *workers))
    ended: dict[int, int] = {}

    def look(rank: int, options: int) -> int:
        if rank not in ended:
            pid, status = os.waitpid(workers[rank], options)
            if not pid:
                return RUNNING
            ended[rank] = os.waitstatus_to_exitcode(status)
        return ended[rank]

    while request := control.recv(NUMBER.size, socket.MSG_WAITALL):
        (rank,) = NUMBER.unpack(request)
        if rank == END:
            break
        control.sendall(NUMBER.pack(look(rank, os.WNOHANG)))
    for rank, worker in enumerate(workers):
        if rank not in ended:  # its pid is not reused until it is reaped
            os.kill(worker, signal.SIGKILL)
    for rank in range(len(workers)):
        look(rank, 0)


def _watch(lifeline: int, parent: int) -> None:
    threading.Thread(target=_end_with_parent, args=(lifeline, parent), daemon=True).start()


def die_with(parent: int) -> None:
    """Make the system kill this process when the parent ends, even if this process is stopped.

    More precisely, when the thread of the parent that started this process ends.
    """
    if sys.platform == "linux":  # the lifeline covers other systems, and a prctl that fails
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before the call of prctl
        os._exit(1)


def _end_with_parent(lifeline: int, parent: int) -> None:
    """Exit when the lifeline closes: only the parent holds its other end."""
    watched = select.poll()
    watched.register(lifeline, select.POLLIN | select.POLLHUP)
    while not watched.poll(_LOOK_AGAIN) and os.getppid() == parent:
        pass
    os._exit(1)
