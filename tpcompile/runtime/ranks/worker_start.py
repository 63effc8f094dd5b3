"""What the interpreter of a worker runs first, before anything heavy is imported."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading

STACK_SIGNAL = signal.SIGUSR1
"""On it a worker writes where it is into the file that its parent reads."""

_LOOK_AGAIN = 1000
"""Milliseconds; the lifeline tells at once, but a fork of the parent may hold it too."""


def main(rank: int, connection: int, lifeline: int, stacks: int, threads: int) -> None:
    """Serve the parent until it has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    parent = os.getppid()
    threading.Thread(target=_end_with_parent, args=(lifeline, parent), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)

    from tpcompile.runtime.ranks.worker import serve

    serve(rank, connection, threads)


def _end_with_parent(lifeline: int, parent: int) -> None:
    """The parent alone holds the other end of the lifeline; its death closes it."""
    watched = select.poll()
    watched.register(lifeline, select.POLLIN | select.POLLHUP)
    while not watched.poll(_LOOK_AGAIN) and os.getppid() == parent:
        pass
    os._exit(1)
