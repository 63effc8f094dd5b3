"""The cores that a process may use: affinity, quotas of both versions, and siblings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machine_files import V1, V2, group, process, topology
from tpcompile.cgroups import groups_of
from tpcompile.cores import cores, cpu_quotas, threads_of

CPU1, CPU2 = f"/ {V1.format('cpu')}", f"/ {V2.format('')}"


@pytest.fixture(autouse=True)
def _eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def _version_1(root: Path, **quotas: int) -> None:
    process(root, "2:cpu,cpuacct:/pods/own\n1:name=systemd:/x\n0::/\n", CPU1)
    for path, quota in quotas.items():
        place = path.replace("__", "/")
        group(root, f"cpu/{place}", cpu__cfs_quota_us=str(quota), cpu__cfs_period_us="100000")


def _version_2(root: Path, **quotas: int | str) -> None:
    process(root, "0::/pods/own\n", CPU2)
    for path, quota in quotas.items():
        group(root, path.replace("__", "/"), cpu__max=f"{quota} 100000")


@pytest.mark.parametrize("version", [_version_1, _version_2])
@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, 8),
        ({"pods__own": 200_000}, 2),
        ({"pods__own": 150_000}, 2),
        ({"pods__own": 149_000}, 1),
        ({"pods__own": 50_000}, 1),
        ({"pods__own": 1_000}, 1),
        ({"pods__own": 1_600_000}, 8),
        ({"pods": 300_000, "pods__own": 500_000}, 3),
        ({"pods": 500_000, "pods__own": 300_000}, 3),
        ({"": 400_000, "pods__own": 500_000}, 4),
        ({"pods__other": 100_000}, 8),
    ],
)
def test_the_smallest_quota_on_the_way_up(
    tmp_path: Path, version: Callable[..., None], quotas: dict[str, int], expected: int
) -> None:
    version(tmp_path, **quotas)
    assert cores(tmp_path) == expected


def test_no_quota(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    _version_1(tmp_path / "1", pods__own=-1, pods=-1)
    _version_2(tmp_path / "2", pods__own="max", pods="max")
    for root in (tmp_path / "1", tmp_path / "2", tmp_path / "none"):
        assert (list(cpu_quotas(root)), cores(root)) == ([], 8)


def test_both_versions_at_once(tmp_path: Path) -> None:
    """The mount of version 2 has no CPU controller if that of version 1 has it."""
    process(tmp_path, "3:cpu:/own\n0::/own\n", CPU1, f"/ {V2.format('/unified')}")
    group(tmp_path, "cpu/own", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    group(tmp_path, "unified/own", cgroup__procs="1")
    assert list(cpu_quotas(tmp_path)) == [2.5]
    assert cores(tmp_path) == 3


@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/docker/id", "/docker/id"),  # the host's paths
        ("/", "/"),  # a namespace
        ("/docker/id", "/other"),
        ("/../../sibling", "/"),  # moved out of its namespace
        ("/", "/../.."),  # mounted before there was a namespace
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_mount_in_a_container_is_its_own_group(
    tmp_path: Path, path: str, mounted: str, version: int
) -> None:
    mount = V1.format("cpu") if version == 1 else V2.format("")
    process(tmp_path, f"4:cpu:{path}\n" if version == 1 else f"0::{path}\n", f"{mounted} {mount}")
    group(tmp_path, "cpu", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    group(tmp_path, "", cpu__max="300000 100000")
    group(tmp_path, "../sibling", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    group(tmp_path, "../../sibling", cpu__max="100000 100000")
    assert cores(tmp_path) == 3


def test_a_group_below_that_of_the_container(tmp_path: Path) -> None:
    process(tmp_path, "0::/docker/id/inner\n", f"/docker/id {V2.format('')}")
    group(tmp_path, "inner", cpu__max="200000 100000")
    assert cores(tmp_path) == 2


def test_a_mount_point_with_a_space(tmp_path: Path) -> None:
    process(tmp_path, "0::/\n", r"/ /sys/fs/cgroup/a\040b rw - cgroup2 cgroup2 rw")
    group(tmp_path, "a b", cpu__max="200000 100000")
    assert cores(tmp_path) == 2


def test_groups_end_at_the_mount(tmp_path: Path) -> None:
    process(tmp_path, "0::/a/b\n", CPU2)
    mount = tmp_path / "sys/fs/cgroup"
    assert [item.path for item in groups_of("cpu", tmp_path)] == [mount / "a/b", mount / "a", mount]


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_siblings_count_once(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topology(tmp_path, *(f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)), name=name)
    assert cores(tmp_path) == 4
    for allowed, expected in (({0, 4}, 1), ({0, 1}, 2), ({0, 1, 4}, 2), ({3}, 1), ({6, 9}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpus=allowed: cpus)
        assert cores(tmp_path) == expected


def test_a_quota_above_the_cores_and_below_the_siblings(tmp_path: Path) -> None:
    topology(tmp_path, *(f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)))
    _version_2(tmp_path, pods__own=600_000)
    assert cores(tmp_path) == 4


def test_this_machine() -> None:
    assert cores() >= 1


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpcompile.cores.cores", lambda: 8)
    assert [threads_of(ranks) for ranks in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert threads_of(3, 5) == 5
