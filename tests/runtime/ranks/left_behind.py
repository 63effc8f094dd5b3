"""Helpers for tests of faults: time limits, leftover processes and leftover files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

FAULT_S = 30.0
"""The time limit for reporting a fault.

It is half of the limit of an idle rank (60 s), to tell the two apart, but much more than a busy
machine needs.
"""


def until(holds: Callable[[], bool], seconds: float = FAULT_S) -> bool:
    """Return whether a condition becomes true within this time."""
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
    """Return whether all these processes are gone, and are not zombies."""
    return until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds)


def stopped_running(pids: Collection[int]) -> bool:
    """Return whether each process has ended, possibly as a zombie not yet reaped."""
    return until(lambda: all(_stat(pid)[0] == "Z" for pid in pids))


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process is gone."""
    return int(_stat(pid)[1])


def descendants() -> set[int]:
    """Return the processes that this one started, directly or not, including zombies.

    The workers of a model are children of its launcher, not of this process.
    """
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    parents = {pid: parent_of(pid) for pid in pids}
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {os.getpid()}


def own_files() -> set[str]:
    """Return the open files of this process, and the names in the memory file system."""
    files = set(os.listdir("/dev/shm"))
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files.add(f"{file} {os.readlink(f'/proc/self/fd/{file}')}")
    return files


def only_files(before: set[str]) -> bool:
    """Return whether no new files remain; other processes may use the memory file system too."""
    return until(lambda: own_files() <= before)


def _stat(pid: int) -> list[str]:
    """Return the state and the parent of a process, or those of a zombie if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return ["Z", "0"]
