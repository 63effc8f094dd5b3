"""The calls of a model that threads are in the midst of, for the end of the interpreter."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tpcompile.runtime.ranks.owner import Owner

_LAST_S = 10.0
"""How long the interpreter may wait for a step that a daemon thread has begun."""


class OpenCalls:
    """Keeps daemon threads out of torch while the interpreter ends.

    Python stops such a thread where it takes the lock of the interpreter. In torch that ends the
    process with SIGABRT. So a thread ends at its next call of the model, as if it called
    `sys.exit`, and the interpreter waits until it has freed its tensors and is gone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[threading.Thread] = Counter()
        self._sent_away: set[threading.Thread] = set()
        self._ending = False
        self._owner = Owner()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """A call, or one within another."""
        me = threading.current_thread()
        with self._changed:
            if self._ends_here():
                self._sent_away.add(me)
                raise SystemExit
            self._inside[me] += 1
        try:
            yield
        except Exception:
            if self._ends_here():  # the ranks are gone, and the thread goes too
                self._sent_away.add(me)
                raise SystemExit from None
            raise
        finally:
            with self._changed:
                self._inside[me] -= 1
                self._inside += Counter()  # without those that are out
                self._changed.notify_all()

    def end(self) -> None:
        """Let no other thread begin a call, and wait for those that have."""
        if not self._owner.here:  # in a fork there are no other threads
            return
        until = time.monotonic() + _LAST_S
        me = threading.current_thread()
        with self._changed:
            self._ending = True
            self._changed.wait_for(lambda: not set(self._inside) - {me}, _LAST_S)
            sent_away = self._sent_away - {me}
        for thread in sent_away:
            thread.join(max(0.0, until - time.monotonic()))

    def _ends_here(self) -> bool:
        return self._ending and threading.current_thread() is not threading.main_thread()
