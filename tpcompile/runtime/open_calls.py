"""The calls of a model in progress, so that the interpreter can wait for them when it ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from tpcompile.runtime.ranks.owner import Owner

_LAST_S = 10.0
"""The maximum time that the interpreter waits for steps of daemon threads."""
_BETWEEN_S = 1.0
"""The time after a call for which a daemon thread is expected to make the next one."""


class OpenCalls:
    """A guard that keeps daemon threads out of torch while the interpreter exits.

    Python stops a daemon thread when it acquires the GIL. Inside torch this aborts the process
    with SIGABRT. Therefore a thread exits at its next call of the model, as if it called
    `sys.exit`, and the interpreter waits until the thread has freed its tensors and ended.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[threading.Thread] = Counter()
        self._sent_away: set[threading.Thread] = set()
        self._left: WeakKeyDictionary[threading.Thread, float] = WeakKeyDictionary()
        """When threads last left a call: they may still be inside torch, between two calls."""
        self._ending = False
        self._owner = Owner()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Register a call of this thread within the context; calls may nest."""
        current = threading.current_thread()
        with self._changed:
            if self._ends_here():
                self._sent_away.add(current)
                self._changed.notify_all()
                raise SystemExit
            self._inside[current] += 1
        try:
            yield
        except Exception:
            if self._ends_here():  # the ranks have ended, and the thread ends too
                self._sent_away.add(current)
                raise SystemExit from None
            raise
        finally:
            with self._changed:
                self._inside[current] -= 1
                if not self._inside[current]:
                    del self._inside[current]
                self._left[current] = time.monotonic()
                self._changed.notify_all()

    def end(self) -> None:
        """Prevent new calls by other threads, and wait for their open calls."""
        if not self._owner.here:  # a fork has no other threads
            return
        until = time.monotonic() + _LAST_S
        current = threading.current_thread()
        with self._changed:
            self._ending = True
            self._changed.wait_for(lambda: not set(self._inside) - {current}, _LAST_S)
            now = time.monotonic()
            recent = [
                thread
                for thread, left_at in self._left.items()
                if thread.daemon and thread is not current and now - left_at < _BETWEEN_S
            ]
            self._changed.wait_for(
                lambda: all(
                    thread in self._sent_away or not thread.is_alive() for thread in recent
                ),
                _BETWEEN_S,
            )
            sent_away = self._sent_away - {current}
        for thread in sent_away:
            thread.join(max(0.0, until - time.monotonic()))

    def _ends_here(self) -> bool:
        return self._ending and threading.current_thread() is not threading.main_thread()
