"""A table of named entries that other packages can extend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from tpcompile.errors import UsageError, did_you_mean

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Entries by name, in insertion order.

    Looking up an unknown name raises a UsageError that suggests the nearest names.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> None:
        """Add an entry. Raise a UsageError if another entry has the name."""
        if self._entries.get(name, entry) is not entry:
            raise UsageError(
                f"There are two entries for the {self.what} {name!r}",
                got=f"{entry!r} and {self._entries[name]!r}",
                hint="Choose another name",
            )
        self._entries[name] = entry

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise UsageError(f"Unknown {self.what} {name!r}", hint=did_you_mean(name, self))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
