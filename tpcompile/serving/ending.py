"""Closing JSON in time: the tokens that end open values when few tokens are left."""

from __future__ import annotations

import numpy as np

from tpcompile.serving.vocabulary import Vocabulary

_MOST_LEFT = 128
"""The maximum number of tokens left when closing begins."""
_PART = 4
"""Closing begins when this fraction of a continuation is left, if that is less."""


def closes_from(tokens: int) -> int:
    """Return the number of tokens left when closing begins, given the length of a continuation."""
    return min(_MOST_LEFT, tokens // _PART)


class Ending:
    """The state of a JSON text so far: whether it is within a string."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._quoted, self._escaped = False, False

    def read(self, token: int) -> None:
        """Add a token."""
        for byte in self._vocabulary.words[token]:
            if self._escaped:
                self._escaped = False
            elif byte == ord('"'):
                self._quoted = not self._quoted
            else:
                self._escaped = self._quoted and byte == ord("\\")

    def narrow(self, forbidden: np.ndarray) -> None:
        """Forbid all tokens but one that closes a string, an object, an array or a number.

        If none does, forbid those that open an object or an array, or begin with whitespace.
        """
        for closing in (b'"',) if self._quoted else (b"}", b"]", b","):
            token = self._vocabulary.single.get(closing)
            if token is not None and not forbidden[token]:
                forbidden[:] = True
                forbidden[token] = False
                return
        if not self._quoted:
            opening = self._vocabulary.opening
            narrowed = forbidden.copy()
            narrowed[opening] = True
            if not narrowed.all():
                forbidden[opening] = True
