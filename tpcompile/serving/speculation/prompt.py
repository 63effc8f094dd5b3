"""Guesses from the text so far: the tokens after an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tpcompile.serving.speculation.drafters import Wanted

_LENGTHS = (4, 3, 2, 1)
"""The numbers of last tokens to search for, in order."""


class PromptDrafter:
    """Guesses that repeat the tokens after the latest occurrence of the last tokens."""

    free = True

    def __init__(self, most: int) -> None:
        self.most = most
        self._texts: dict[Hashable, _Occurrences] = {}

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Return the tokens after the latest occurrence of each sequence's last tokens."""
        return [
            self._texts.setdefault(request.key, _Occurrences()).next(request.tokens, request.most)
            for request in wanted
        ]

    def forget(self, key: Hashable) -> None:
        """Drop the index of a sequence."""
        self._texts.pop(key, None)


class _Occurrences:
    """The latest occurrence of each run of tokens in a text that grows."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """The place after the latest occurrence of a run that is followed by a token."""
        self._indexed = 0

    def next(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that followed the longest known run at the end."""
        for end in range(self._indexed, len(tokens)):
            for length in _LENGTHS:
                if length <= end:
                    self._after[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)
        for length in _LENGTHS:
            place = self._after.get(tuple(tokens[-length:])) if length < len(tokens) else None
            if place is not None:
                return _continued(tokens, place, most)
        return []


def _continued(tokens: Sequence[int], place: int, most: int) -> list[int]:
    """Return the tokens from a place on. At the end, the text is assumed to repeat."""
    period = len(tokens) - place
    return [tokens[place + offset % period] for offset in range(most)]
