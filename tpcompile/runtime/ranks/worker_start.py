"""The start of the launcher and its workers; nothing heavy is imported before `main` runs."""

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
"""On it a worker writes where it is into the file that its parent reads."""

NUMBER = struct.Struct("i")
"""The parent sends a rank, and the launcher answers with its status."""
END = -1
"""The rank that stands for ending all workers and the launcher."""
RUNNING = 1000
"""The status of a worker that has not ended; real ones are below 256."""

_PR_SET_PDEATHSIG = 1
"""Linux's `prctl` option: the signal that a process gets when its parent ends."""
_LOOK_AGAIN = 1000
"""Milliseconds; the lifeline tells at once, but a fork of the parent may hold it too."""

Files = tuple[int, int, int]
"""A worker's connection, its output, and the file for its stacks."""


def main(parent: int, control: int, lifeline: int, threads: int, ranks: Sequence[Files]) -> None:
    """Import what workers need, fork into them, and report on them until the parent ends."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=ranks[0][2], all_threads=False)

    from tpcompile.runtime.ranks.worker import serve

    gc.freeze()  # or the first collection of each would write to, and so copy, all it shares
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
    """Return the files of several workers."""
    return [file for own in ranks for file in own]


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


def _answer_for(workers: Sequence[int], control: socket.socket) -> None:
    """Report how workers ended; kill the rest on `END` or when the parent is gone."""
    control.sendall(struct.pack(f"{len(workers)}i", *workers))
    ended: dict[int, int] = {}

    def look(rank: int, how: int) -> int:
        if rank not in ended:
            found, status = os.waitpid(workers[rank], how)
            if not found:
                return RUNNING
            ended[rank] = os.waitstatus_to_exitcode(status)
        return ended[rank]

    while asked := control.recv(NUMBER.size, socket.MSG_WAITALL):
        (rank,) = NUMBER.unpack(asked)
        if rank == END:
            break
        control.sendall(NUMBER.pack(look(rank, os.WNOHANG)))
    for rank, worker in enumerate(workers):
        if rank not in ended:  # until it is reaped, no other process can have its number
            os.kill(worker, signal.SIGKILL)
    for rank in range(len(workers)):
        look(rank, 0)


def _watch(lifeline: int, parent: int) -> None:
    threading.Thread(target=_end_with_parent, args=(lifeline, parent), daemon=True).start()


def die_with(parent: int) -> None:
    """Have the system kill this process when the parent ends, even while it is stopped.

    More exactly, when the thread of the parent that started this process ends.
    """
    if sys.platform == "linux":  # elsewhere, and where it is forbidden, there is the lifeline
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before the system was told
        os._exit(1)


def _end_with_parent(lifeline: int, parent: int) -> None:
    """The parent alone holds the other end of the lifeline; its death closes it."""
    watched = select.poll()
    watched.register(lifeline, select.POLLIN | select.POLLHUP)
    while not watched.poll(_LOOK_AGAIN) and os.getppid() == parent:
        pass
    os._exit(1)
