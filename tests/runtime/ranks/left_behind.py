"""What tests of faults share: how soon a fault must be told, and what may be left behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

FAULT_S = 30.0
"""A fault is told within this time: half of the limit of a rank that just waits (60 s), so it was
not that limit that told it, and much more than a busy machine needs."""


def until(holds: Callable[[], bool], seconds: float = FAULT_S) -> bool:
    """Return whether a condition holds, now or within this time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def in_time(seconds: float = FAULT_S) -> Iterator[None]:
    """Assert that the body takes less time than this."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def gone(pids: Collection[int], seconds: float = FAULT_S) -> bool:
    """Return whether no such process is left, not even as a zombie."""
    return until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds)


def stopped_running(pids: Collection[int]) -> bool:
    """Return whether each process has ended; the system reaps orphans when it likes."""
    return until(lambda: all(_stat(pid)[0] == "Z" for pid in pids))


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process is gone."""
    return int(_stat(pid)[1])


def descendants() -> set[int]:
    """Return the processes that this one started, directly or not, zombies too.

    The workers of a model are children of its launcher, not of this process.
    """
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    parents = {pid: parent_of(pid) for pid in pids}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def own_files() -> set[str]:
    """Return the open files of this process, and the names in the memory file system."""
    found = set(os.listdir("/dev/shm"))
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{file} {os.readlink(f'/proc/self/fd/{file}')}")
    return found


def only_files(before: set[str]) -> bool:
    """Return whether no other files stay open; others may use the memory file system too."""
    return until(lambda: own_files() <= before)


def _stat(pid: int) -> list[str]:
    """The state and the parent of a process; those of a reaped one if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return ["Z", "0"]
