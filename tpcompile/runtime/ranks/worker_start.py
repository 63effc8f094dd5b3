"""What the interpreter of a worker runs first, before anything heavy is imported."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading

STACK_SIGNAL = signal.SIGUSR1
"""On it a worker writes where it is into the file that its parent reads."""

_PR_SET_PDEATHSIG = 1
"""Linux's `prctl` option: the signal that a process gets when its parent ends."""
_LOOK_AGAIN = 1000
"""Milliseconds; the lifeline tells at once, but a fork of the parent may hold it too."""


def main(parent: int, rank: int, connection: int, lifeline: int, stacks: int, threads: int) -> None:
    """Serve the parent until it has gone."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    threading.Thread(target=_end_with_parent, args=(lifeline, parent), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)

    from tpcompile.runtime.ranks.worker import serve

    serve(rank, connection, threads)


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
