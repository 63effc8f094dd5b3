"""The process that owns ranks: a fork inherits their sockets, but not their threads."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tpcompile.errors import UsageError


@dataclass(frozen=True)
class Owner:
    """The process in which this object was created."""

    pid: int = field(default_factory=os.getpid)
    owned: str = "The model"
    """The owned object, as the first words of the error."""

    @property
    def here(self) -> bool:
        """Whether the current process is the owner."""
        return os.getpid() == self.pid

    @property
    def refusal(self) -> str:
        """The reason why this process cannot use the ranks; empty in the owner."""
        if self.here:
            return ""
        pid = os.getpid()
        return f"{self.owned} belongs to process {self.pid}; this is process {pid}, forked from it"

    def check(self) -> None:
        """Raise in any other process."""
        check_open(self.refusal)


def check_open(closed: str) -> None:
    """Raise if `closed` is not empty; it is the reason why the ranks cannot be used."""
    if closed:
        raise UsageError(closed, hint="Compile it again")
