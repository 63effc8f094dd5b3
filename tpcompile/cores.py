"""The number of cores that this process may use, and the share of each rank."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from tpcompile.cgroups import ROOT, ControlGroup, groups_of

MOST_THREADS = 1024
"""The limit of threads per rank: OpenMP ends the process if the system refuses a thread."""


def threads_of(ranks: int = 1, threads: int | None = None) -> int:
    """Return the threads of a rank: `threads`, or an equal share of the cores.

    `ranks` is the number of ranks on this machine.
    """
    return max(1, cores() // ranks) if threads is None else threads


def cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use.

    It is the number of physical cores among the CPUs of its affinity, or the smallest CPU quota
    of its control groups, rounded, if that is lower. `root` is where `/proc` and `/sys` are.
    """
    if hasattr(os, "sched_getaffinity"):
        physical = len({_core_of(cpu, root) for cpu in os.sched_getaffinity(0)})
    else:
        physical = os.cpu_count() or 1
    return max(1, min((physical, *map(_rounded, cpu_quotas(root)))))


def cpu_quotas(root: Path = ROOT) -> Iterator[float]:
    """Yield the quota, in CPUs, of each control group of this process that has one."""
    for group in groups_of("cpu", root):
        quota, period = _quota_v2(group) if group.version == 2 else _quota_v1(group)
        if quota > 0 and period > 0:
            yield quota / period


def _quota_v1(group: ControlGroup) -> tuple[int, int]:
    """Return the quota and the period in µs; the quota is negative if time is not limited."""
    return group.number("cpu.cfs_quota_us") or 0, group.number("cpu.cfs_period_us") or 0


def _quota_v2(group: ControlGroup) -> tuple[int, int]:
    """Return the quota and the period in µs; the quota is 0 if time is not limited."""
    quota, period = (group.read("cpu.max") or "max 0").split()
    return 0 if quota == "max" else int(quota), int(period)


def _rounded(quota: float) -> int:
    """Round half up: with 1.5 cores, two threads overlap their waits for memory."""
    return math.floor(quota + 0.5)


def _core_of(cpu: int, root: Path) -> str:
    """Return the CPUs that share a core with this one, in the words of the system."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        if (topology / name).exists():
            return (topology / name).read_text().strip()
    return str(cpu)
