"""The protocol of drafters, which guess the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for guesses of the tokens after a sequence."""

    key: Hashable
    """The sequence. It only grows from one request to the next."""
    tokens: Sequence[int]
    """The prompt and all new tokens."""
    most: int
    """The maximum number of guesses."""


class Drafter(Protocol):
    """Guesses the next tokens of sequences. A package of your own may implement it."""

    most: int
    """The maximum number of guesses per sequence and step."""
    free: bool
    """Whether the time of guesses is negligible."""

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Return guesses for each sequence, possibly none."""
        ...

    def forget(self, key: Hashable) -> None:
        """Drop the data of a sequence that has ended or waits again."""
        ...
