"""A table of named entries that other packages can extend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from tpcompile.errors import UsageError, did_you_mean, spelled

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Entries by name, in insertion order. Lookups ignore upper and lower case.

    Looking up an unknown name raises a UsageError that suggests the nearest names.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> None:
        """Add an entry. Raise a UsageError if another entry has the name, in any case."""
        known = spelled(name, self._entries)
        if known is not None and self._entries[known] is not entry:
            raise UsageError(
                f"There are two entries for the {self.kind} {name!r}",
                got=f"{entry!r} and {self._entries[known]!r}",
                hint="Choose another name",
            )
        self._entries[name] = entry

    def spelling(self, name: str) -> str:
        """Return the name of an entry as it was registered, given in any case."""
        spelling = spelled(name, self._entries)
        if spelling is None:
            raise UsageError(f"Unknown {self.kind} {name!r}", hint=did_you_mean(name, self))
        return spelling

    def __getitem__(self, name: str) -> T:
        return self._entries[self.spelling(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and spelled(name, self._entries) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
