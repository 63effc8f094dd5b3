"""What a side must stand: busy processes, fewer cores, and a CPU quota."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.memory import family
from tpcompile.closing import Closing

_BUSY = """\
import os, sys
os.nice(int(sys.argv[1]))
parent = int(sys.argv[2])
print(flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""A busy process. It looks for its parent only every few milliseconds."""
_SETTLE_S = 0.05
_PASSES = 3
"""Passes over the threads of a process, because one of them may start another one meanwhile."""
_REMOVE_S = 5.0
"""The time that the kernel may take to forget the last processes of a cgroup."""
_PERIOD_US = 100_000
"""The period of a quota: the kernel's default."""
_MOUNTS, _OWN = Path("/proc/self/mounts"), Path("/proc/self/cgroup")


class QuotaError(Exception):
    """A CPU quota that this system or user does not allow."""


class LeftCoresError(Exception):
    """Threads that left the cores to which they were restricted."""


@contextmanager
def busy(nices: Sequence[int]) -> Iterator[list[int]]:
    """Run a busy process for each nice value, relative to this process; yield their ids."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for nice in nices:
            command = [sys.executable, "-I", "-S", "-c", _BUSY, str(nice), str(os.getpid())]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise OSError(f"a busy process ended with status {process.wait()}")
        time.sleep(_SETTLE_S if processes else 0)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@contextmanager
def restricted(processes: Iterable[int], cores: Sequence[int]) -> Iterator[None]:
    """Restrict all threads of these processes and of their descendants, as `taskset -a` does.

    Afterwards they may use the same cores as before. A program may widen its own set of cores
    again, and would be measured as if it had more, so that is an error.
    """
    previous: dict[int, set[int]] = {}
    families = list(processes)
    try:
        for _ in range(_PASSES):
            for thread, allowed in _outside(families, cores).items():
                previous.setdefault(thread, allowed)
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, cores)
        yield
        if outside := _outside(families, cores):
            raise LeftCoresError(
                f"{len(outside)} threads were restricted to cores {sorted(cores)} and now use "
                f"{sorted(set().union(*outside.values()))}"
            )
    finally:
        for thread, allowed in previous.items():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, allowed)


def _outside(processes: Sequence[int], cores: Sequence[int]) -> dict[int, set[int]]:
    """Return the threads that may use other cores than these, with the cores that they may use."""
    outside = {}
    for process in (member for first in processes for member in family(first)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{process}/task"):
                allowed = os.sched_getaffinity(int(thread))
                if not allowed <= set(cores):
                    outside[int(thread)] = allowed
    return outside


class Quota(Closing):
    """A cgroup, of version 1 or 2, whose processes together get the time of some cores."""

    def __init__(self, cores: float, mounts: Path = _MOUNTS, cgroup: Path = _OWN) -> None:
        """Make the cgroup. Raise QuotaError if that is impossible."""
        self._parent, version = _parent(mounts.read_text(), cgroup.read_text())
        self.directory = self._parent / f"tpcompile-benchmark-{os.getpid()}"
        quota = str(round(cores * _PERIOD_US))
        limits = {"cpu.max": f"{quota} {_PERIOD_US}"}
        if version == 1:
            limits = {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota}
        try:
            self.directory.mkdir()
        except OSError as error:
            raise QuotaError(f"{self.directory} cannot be made: {error.strerror}") from error
        try:
            for name, value in limits.items():
                (self.directory / name).write_text(value)
        except OSError as error:
            self.directory.rmdir()
            raise QuotaError(f"{self.directory / name}: {error.strerror}") from error

    @contextmanager
    def around(self, process: int) -> Iterator[None]:
        """Move a process and its descendants into the cgroup, and back afterwards."""
        processes = family(process)
        before = _own_directory(process)
        _move(processes, self.directory)
        try:
            yield
        finally:
            _move(processes, before)

    def close(self) -> None:
        """Remove the cgroup. Its processes must have ended."""
        deadline = time.monotonic() + _REMOVE_S
        while True:
            try:
                return self.directory.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def _move(processes: Iterable[int], directory: Path) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            (directory / "cgroup.procs").write_text(str(process))


def _own_directory(process: int) -> Path:
    """Return the directory of a process's cgroup that may limit its CPU time."""
    directory, _, _ = _hierarchy(_MOUNTS.read_text(), Path(f"/proc/{process}/cgroup").read_text())
    return directory


def _parent(mounts: str, cgroup: str) -> tuple[Path, int]:
    """Return the directory in which a cgroup with a quota can be made, and its version."""
    directory, mount, version = _hierarchy(mounts, cgroup)
    if version == 1:
        return directory, 1
    for place in (directory, *directory.parents):
        enabled = place / "cgroup.subtree_control"
        if enabled.exists() and "cpu" in enabled.read_text().split():
            return place, 2
        if place == mount:
            break
    raise QuotaError(f"no cgroup from {directory} to {mount} gives its children the controller cpu")


def _hierarchy(mounts: str, cgroup: str) -> tuple[Path, Path, int]:
    """Return the directory of a process's cgroup, the mount of its hierarchy, and its version."""
    fields = [line.split() for line in mounts.splitlines()]
    first = [Path(f[1]) for f in fields if f[2] == "cgroup" and "cpu" in f[3].split(",")]
    second = [Path(f[1]) for f in fields if f[2] == "cgroup2"]
    for number, controllers, path in (line.split(":", 2) for line in cgroup.splitlines()):
        is_first = "cpu" in controllers.split(",")
        if mounted := first if is_first else second if number == "0" and not first else []:
            directory = mounted[0] / path.lstrip("/")
            # within a container the path may be that of the host
            directory = directory if directory.is_dir() else mounted[0]
            return directory, mounted[0], 1 if is_first else 2
    raise QuotaError("no hierarchy of cgroups with the controller cpu is mounted")
