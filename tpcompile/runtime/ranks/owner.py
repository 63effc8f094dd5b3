"""The process that ranks belong to: a fork of it has their sockets, and none of their threads."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tpcompile.errors import UsageError


@dataclass(frozen=True)
class Owner:
    """The process that this was made in."""

    pid: int = field(default_factory=os.getpid)
    owned: str = "The model"
    """What belongs to it, as the first words of a refusal."""

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self.pid

    @property
    def refusal(self) -> str:
        """Why nothing can be run in this process; empty in the owner."""
        if self.here:
            return ""
        own = os.getpid()
        return f"{self.owned} belongs to process {self.pid}; this is process {own}, forked from it"

    def check(self) -> None:
        """Refuse any other process."""
        check_open(self.refusal)


def check_open(closed: str) -> None:
    """Refuse to use ranks that are `closed`, which says why; it is empty for open ones."""
    if closed:
        raise UsageError(closed, hint="Compile it again")
