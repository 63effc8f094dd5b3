"""The control groups of Linux that limit this process, of version 1 and of version 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
"""The directory with `/proc` and `/sys`."""
_KINDS = {"cgroup": 1, "cgroup2": 2}
"""The version of each type of file system."""


@dataclass(frozen=True)
class ControlGroup:
    """A directory with the limits of a group of processes."""

    path: Path
    version: int

    def read(self, name: str) -> str | None:
        """Return the text of a file, or None if the group does not have it."""
        file = self.path / name
        return file.read_text().strip() if file.exists() else None

    def number(self, name: str) -> int | None:
        """Return the integer in a file, or None if the group does not have it."""
        text = self.read(name)
        return None if text is None else int(text)


@dataclass(frozen=True)
class _Mount:
    point: Path
    group: PurePosixPath
    """The group whose directory is mounted; in a container it may be its own."""
    version: int
    controllers: tuple[str, ...]


def groups_of(controller: str, root: Path = ROOT) -> Iterator[ControlGroup]:
    """Yield the groups of this process that a controller may limit, each before its parent.

    Groups outside of a container are not visible in it.
    """
    groups = _own_groups(root)
    for mount in _mounts(root):
        key = "" if mount.version == 2 else controller
        if key not in groups or (key and key not in mount.controllers):
            continue
        place = mount.point / _below(groups[key], mount.group)
        while place.is_relative_to(mount.point):
            yield ControlGroup(place, mount.version)
            place = place.parent


def _own_groups(root: Path) -> dict[str, PurePosixPath]:
    """Return the group of this process for each controller; version 2 has the empty name."""
    groups: dict[str, PurePosixPath] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), PurePosixPath(path))
    return groups


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        type, _, options = kind.split(" ", 2)
        if type in _KINDS:
            group, point = (_unescaped(field) for field in place.split(" ")[3:5])
            where = root / point.lstrip("/")
            yield _Mount(where, PurePosixPath(group), _KINDS[type], tuple(options.split(",")))


def _below(group: PurePosixPath, mounted: PurePosixPath) -> PurePosixPath:
    """Return the path from the mounted group to a group, or to itself if it is elsewhere."""
    if ".." in group.parts or not group.is_relative_to(mounted):
        return PurePosixPath()
    return group.relative_to(mounted)


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="surrogateescape").splitlines() if file.exists() else []
