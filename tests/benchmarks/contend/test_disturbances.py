"""Busy processes always end, and restrictions apply only for a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.contend import disturbances
from benchmarks.contend.disturbances import LeftCoresError, Quota, QuotaError, busy, restricted

LIMIT_S = 120.0
_THREADS = """
import sys, threading
threading.Thread(target=sys.stdin.read, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""
_BUSY_PARENT = """
import sys, time
from benchmarks.contend.disturbances import busy
with busy([0]) as processes:
    print(*processes, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def process() -> Iterator[int]:
    """A process with two threads."""
    started = subprocess.Popen(
        [sys.executable, "-c", _THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert started.stdout is not None and started.stdout.readline()
    yield started.pid
    started.kill()
    started.communicate()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def _cores(process: int) -> list[set[int]]:
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{process}/task")]


def test_busy_processes_are_as_nice_as_told_and_end() -> None:
    niceness, children = os.nice(0), []

    def fail_beside_them() -> None:
        with busy([0, 3]) as processes:
            children.extend(processes)
            nices = [os.getpriority(os.PRIO_PROCESS, process) for process in processes]
            assert nices == [niceness, min(19, niceness + 3)]
            raise KeyError

    with pytest.raises(KeyError):
        fail_beside_them()
    assert len(children) == 2 and not any(map(_runs, children))


def test_a_busy_process_ends_after_its_parent_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _BUSY_PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert _runs(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + LIMIT_S
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def test_all_threads_are_restricted_and_released(process: int) -> None:
    before = _cores(process)
    core = {max(before[0])}
    with restricted([process], list(core)):
        assert _cores(process) == [core, core]
    assert _cores(process) == before and len(before) == 2


def test_a_thread_that_leaves_its_cores_is_an_error(process: int) -> None:
    cores = os.sched_getaffinity(process)
    if len(cores) < 2:
        pytest.skip("a thread cannot leave the only core")
    with (
        pytest.raises(LeftCoresError, match="1 threads were restricted to cores"),
        restricted([process], [max(cores)]),
    ):
        os.sched_setaffinity(process, cores)


def _system(directory: Path, mounted: str, cgroup: str) -> tuple[Path, Path]:
    """Write files like /proc/self/mounts and /proc/self/cgroup; `{}` is the directory."""
    mounts, groups = directory / "mounts", directory / "groups"
    mounts.write_text(mounted.format(directory))
    groups.write_text(cgroup)
    return mounts, groups


_FIRST = "cgroup {0}/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup2 {0}/unified cgroup2 rw 0 0\n"
_SECOND = "cgroup2 {0}/unified cgroup2 rw 0 0\n"


def test_a_quota_of_version_1(tmp_path: Path) -> None:
    (tmp_path / "cpu" / "mine").mkdir(parents=True)
    quota = Quota(1.5, *_system(tmp_path, _FIRST, "2:cpu,cpuacct:/mine\n0::/\n"))
    assert quota.directory.parent == tmp_path / "cpu" / "mine"
    files = {file.name: file.read_text() for file in quota.directory.iterdir()}
    assert files == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    for name in files:  # a real cgroup is removed with its files
        (quota.directory / name).unlink()
    quota.close()
    assert not quota.directory.exists()


def test_a_quota_of_version_2_is_made_where_children_have_the_controller(tmp_path: Path) -> None:
    session = tmp_path / "unified" / "user" / "session"
    session.mkdir(parents=True)
    for directory, controllers in (
        (session, ""),
        (session.parent, "cpu memory"),
        (session.parent.parent, "cpu"),
    ):
        (directory / "cgroup.subtree_control").write_text(controllers)
    quota = Quota(0.5, *_system(tmp_path, _SECOND, "0::/user/session\n"))
    assert quota.directory.parent == session.parent
    assert (quota.directory / "cpu.max").read_text() == "50000 100000"


@pytest.mark.parametrize(
    ("mounted", "cgroup", "says"),
    [
        (_SECOND, "0::/\n", "gives its children the controller cpu"),
        ("tmpfs {0} tmpfs rw 0 0\n", "0::/\n", "no hierarchy of cgroups"),
        (_FIRST, "2:cpu:/of/the/host\n", "cannot be made: Not a directory"),
    ],
)
def test_a_quota_that_is_impossible_says_why(
    tmp_path: Path, mounted: str, cgroup: str, says: str
) -> None:
    (tmp_path / "unified").mkdir()
    (tmp_path / "cpu").write_text("no directory")
    with pytest.raises(QuotaError, match=says):
        Quota(1.5, *_system(tmp_path, mounted, cgroup))


def test_processes_are_moved_into_a_quota_and_back(process: int) -> None:
    before = disturbances._own_directory(process) if _has_groups() else None
    try:
        quota = Quota(1.5)
    except QuotaError as error:
        pytest.skip(f"no quota can be made here: {error}")
    with quota:
        with quota.around(process):
            assert disturbances._own_directory(process) == quota.directory
        assert disturbances._own_directory(process) == before
    assert not quota.directory.exists()


def _has_groups() -> bool:
    try:
        disturbances._own_directory(os.getpid())
    except QuotaError:
        return False
    return True
