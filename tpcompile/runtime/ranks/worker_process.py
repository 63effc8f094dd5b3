"""A worker as its parent sees it: the channel to it, and what it leaves behind."""

from __future__ import annotations

import os
import select
import signal
from typing import IO

from tpcompile.errors import RankError
from tpcompile.runtime.ranks.channel import Channel

_WHY: dict[int, str] = {
    signal.SIGKILL: "The system kills processes when memory runs out: see its log",
    signal.SIGBUS: "A file that it read may have become shorter, or a disk may be full or broken",
}
"""What the system may mean by a signal."""
_TAIL = 3000


class WorkerProcess:
    """The process of one rank, which a launcher starts and can tell the status of."""

    def __init__(self, rank: int, channel: Channel, errors: IO[bytes], stacks: IO[bytes]) -> None:
        self.rank = rank
        self.channel = channel
        self._errors = errors
        self._stacks = stacks

    def alive(self) -> bool:
        """Whether it still holds its end of the channel."""
        watched = select.poll()
        watched.register(self.channel.fileno(), 0)
        return not watched.poll(0)

    def death(self, status: int | None) -> RankError:
        """Why the process is gone, or about to go: its connection is closed."""
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

    def size_of_stacks(self) -> int:
        """Where in the file of stacks the next one will begin."""
        return os.fstat(self._stacks.fileno()).st_size

    def stack_since(self, start: int) -> str:
        length = self.size_of_stacks() - start
        return os.pread(self._stacks.fileno(), length, start).decode(errors="replace").strip()

    def close(self) -> None:
        """Close all files."""
        self.channel.close()
        self._errors.close()
        self._stacks.close()

    def _said(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        start = max(size - _TAIL, 0)
        return os.pread(self._errors.fileno(), _TAIL, start).decode(errors="replace").strip()
