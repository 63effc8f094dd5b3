"""The memory of running processes, sampled from outside.

Memory counts if it cannot be dropped and read again from a file: anonymous pages, the process's
share of shared memory (each page divided by the number of processes that map it, so that the ranks
add up), and swapped-out pages. Pages of mapped checkpoint files are not counted, because the
kernel reclaims them whenever it needs memory.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

INTERVAL_SECONDS = 0.02
COUNTED = ("Anonymous", "Pss_Shmem", "Swap")


def own_bytes(pid: int) -> int:
    """Return the bytes that a process holds now; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(fields[name].split()[0]) for name in COUNTED)


def family(pid: int) -> list[int]:
    """Return a process and its running descendants."""
    processes, waiting = [], [pid]
    while waiting:
        processes.append(waiting.pop())
        for children in Path(f"/proc/{processes[-1]}/task").glob("*/children"):
            try:
                waiting += [int(child) for child in children.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has ended meanwhile
    return processes


class MemoryWatch:
    """Sampler of a process and its descendants. It runs in a thread until the block ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peaks: dict[int, int] = {}
        """The largest number of bytes seen, by process."""

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            for pid in family(self._pid):
                self.peaks[pid] = max(self.peaks.get(pid, 0), own_bytes(pid))

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
