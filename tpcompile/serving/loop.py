"""The loop of an engine, in a thread or in waiting callers, with commands between steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tpcompile.errors import RankError, UsageError

_BEAT_S = 5.0
"""The time between beats, if there are no steps."""


class Loop:
    """A loop that runs steps while there is work, and each command before the next step."""

    def __init__(
        self, step: Callable[[], bool], has_work: Callable[[], bool], beat: Callable[[], None]
    ) -> None:
        """`step` returns whether work remains. The thread calls `beat` while it is idle."""
        self._step, self._has_work, self._beat = step, has_work, beat
        self._commands: deque[Callable[[], None]] = deque()
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.failure = ""
        """The reason why no step can run; empty while steps can."""

    def command(self, command: Callable[[], None]) -> None:
        """Queue a command, which runs before the next step."""
        with self._turn:
            if self._closed:
                raise UsageError("The engine is closed")
            if self.failure:
                raise RankError(f"The engine cannot go on: {self.failure}")
            self._commands.append(command)
            self._turn.notify_all()

    def run_commands(self) -> None:
        """Run the commands so far."""
        while self._commands:
            self._commands.popleft()()

    def drive(self) -> bool:
        """Run a step for a waiting caller, unless a thread does; return whether work is left."""
        if self._closed:
            raise UsageError("The engine is closed")
        if self._thread is not None:
            return False
        return self._step()

    def start(self) -> None:
        """Run steps in a thread whenever there is work."""
        with self._turn:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()

    def close(self) -> bool:
        """End the thread and run the last commands; return False if that was done before."""
        with self._turn:
            if self._closed:
                return False
            self._closed = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.run_commands()
        return True

    def _run(self) -> None:
        while True:
            with self._turn:
                ready = self._turn.wait_for(self._has_turn, _BEAT_S)
                if self._closed or self.failure:
                    return
            try:
                if ready:
                    self._step()
                else:
                    self._beat()
            except Exception:  # handles raise it, or `failure` has its text
                continue

    def _has_turn(self) -> bool:
        return bool(self._closed or self._commands or self._has_work())
