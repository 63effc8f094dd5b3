"""How much memory processes hold while they work, sampled from outside.

Counted is what belongs to a process and cannot be dropped and read again from a file: its
anonymous pages, its share of memory that it has in common with others (each page divided by
those who map it, so that the ranks add up), and what of it was swapped out. Pages of mapped
checkpoint files are not counted: the system takes them back whenever it needs them.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

INTERVAL_SECONDS = 0.02
COUNTED = ("Anonymous", "Pss_Shmem", "Swap")


def own_bytes(pid: int) -> int:
    """What a process holds now; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(fields[name].split()[0]) for name in COUNTED)


def family(pid: int) -> list[int]:
    """A process and all that it started, directly or not, of those that still run."""
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                waiting += [int(child) for child in children.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has ended meanwhile
    return found


class MemoryWatch:
    """Samples a process and all that it starts, from a thread, until the block ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peaks: dict[int, int] = {}
        """The most bytes seen of each process."""
        self.samples = 0

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            for pid in family(self._pid):
                self.peaks[pid] = max(self.peaks.get(pid, 0), own_bytes(pid))
            self.samples += 1

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
