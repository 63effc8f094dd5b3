"""Fake `/proc` and `/sys` of Linux, for tests of what a process may use."""

from __future__ import annotations

from pathlib import Path

V1 = "/sys/fs/cgroup/{0} rw,nosuid - cgroup cgroup rw,{0}"
V2 = "/sys/fs/cgroup{0} rw,nosuid shared:4 - cgroup2 cgroup2 rw"


def process(root: Path, groups: str, *mounts: str) -> None:
    """Write the groups of this process, and mounts as "GROUP POINT OPTIONS - TYPE …"."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    rows = [
        f"{row} 1 0:{row} {mount}\n" for row, mount in enumerate(["/ / rw - ext4 a rw", *mounts])
    ]
    (root / "proc/self/mountinfo").write_bytes(b"9 1 0:9 / /\xff rw - ext4 a rw\n")
    with (root / "proc/self/mountinfo").open("a") as file:
        file.writelines(rows)


def group(root: Path, path: str, **files: str) -> None:
    """Write the files of a control group; `cpu__max` is "cpu.max"."""
    place = root / "sys/fs/cgroup" / path
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text + "\n")


def topology(root: Path, *siblings: str, name: str = "core_cpus_list") -> None:
    """Write the CPUs that share a core with each CPU."""
    for cpu, text in enumerate(siblings):
        place = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        place.mkdir(parents=True)
        (place / name).write_text(text + "\n")
