"""The parent's handle to a worker: its channel, its output and its stacks."""

from __future__ import annotations

import os
import select
import signal
from typing import IO

from tpcompile.errors import RankError
from tpcompile.runtime.ranks.channel import Channel

_WHY: dict[int, str] = {
    signal.SIGKILL: "The system may have run out of memory: see its log",
    signal.SIGBUS: "A file that it read may have been truncated, or a disk may be full or broken",
}
"""Likely causes of a death by signal, as hints."""
_TAIL = 3000


class WorkerProcess:
    """The process of one rank. The launcher starts it and reports its exit status."""

    def __init__(self, rank: int, channel: Channel, errors: IO[bytes], stacks: IO[bytes]) -> None:
        self.rank = rank
        self.channel = channel
        self._errors = errors
        self._stacks = stacks

    def alive(self) -> bool:
        """Return whether the process still holds its end of the channel."""
        watched = select.poll()
        watched.register(self.channel.fileno(), 0)
        return not watched.poll(0)

    def death(self, status: int | None) -> RankError:
        """Return the error for an ended or ending process, whose connection is closed."""
        if status is None:
            return RankError(f"Rank {self.rank} closed its connection but did not end")
        hint = ""
        if status < 0:
            ending = f"was killed by signal {signal.Signals(-status).name}"
            hint = _WHY.get(-status, "")
        else:
            ending = f"exited with status {status}"
        output = self._last_output()
        got = f"this at the end of its output:\n{output}\n" if output else ""
        return RankError(f"Rank {self.rank} {ending}", got=got, hint=hint)

    def size_of_stacks(self) -> int:
        """Return the offset of the next stack in the file of stacks."""
        return os.fstat(self._stacks.fileno()).st_size

    def stack_since(self, start: int) -> str:
        """Return the stacks written from this offset on."""
        length = self.size_of_stacks() - start
        return os.pread(self._stacks.fileno(), length, start).decode(errors="replace").strip()

    def close(self) -> None:
        """Close all files."""
        self.channel.close()
        self._errors.close()
        self._stacks.close()

    def _last_output(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        start = max(size - _TAIL, 0)
        return os.pread(self._errors.fileno(), _TAIL, start).decode(errors="replace").strip()
