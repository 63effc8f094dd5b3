"""The tokens that may follow in one continuation, by its grammar."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from tpcompile.errors import RequestError
from tpcompile.serving.ending import Ending
from tpcompile.serving.vocabulary import BLANK, Vocabulary
from tpcompile.serving.words import overlap

_MOST_BLANK = 4
"""The tokens of whitespace between the prelude and the form."""


class Matcher:
    """The state of a grammar after the tokens of a continuation.

    Call `forbidden` before a token, and `accept` after it. The mask of the next token may be
    computed in another thread in between.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        automaton: Any,
        prelude: Prelude | None,
        ending: Ending | None,
        ends: Collection[int],
        worker: ThreadPoolExecutor,
    ) -> None:
        """Begin. `ends` are the tokens that end the continuation where its text is complete."""
        self._vocabulary, self._automaton, self._prelude = vocabulary, automaton, prelude
        self._ending, self._closes = ending, False
        self._ends = np.array(sorted(ends), np.int64)
        self._worker = worker
        self._words = np.zeros(-(-vocabulary.size // 32), np.int32)
        self._next: Future[np.ndarray] | None = None
        self.complete = False
        """Whether the text has the form, and nothing can follow."""

    def look_ahead(self, closes: bool) -> None:
        """Start computing the mask of the next token, which `closes` JSON if possible."""
        self._closes = closes
        self._next = self._worker.submit(self._compute)

    def forbidden(self) -> np.ndarray:
        """Return whether each token is forbidden as the next one."""
        pending, self._next = self._next, None
        return self._compute() if pending is None else pending.result()

    def accept(self, token: int) -> None:
        """Add a token that is not forbidden."""
        if self._prelude is not None and self._prelude.takes(token):
            return
        if not self._automaton.consume_token(token):
            raise RequestError(
                f"The structure does not allow token {token}", got=self._automaton.get_error()
            )
        if self._ending is not None:
            self._ending.read(token)
        self.complete = self._automaton.is_accepting() and self._automaton.is_stopped()

    def _compute(self) -> np.ndarray:
        """Compute the mask. A complete text allows no token."""
        if self._prelude is not None and self._prelude.open:
            return self._prelude.forbidden()
        self._automaton.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if error := self._automaton.get_error():
            raise RequestError("The structure cannot be continued", got=error)
        bits = np.unpackbits(~self._words.view(np.uint8), bitorder="little")
        forbidden: np.ndarray = bits[: self._vocabulary.size].view(np.bool_)
        forbidden[self._vocabulary.ends] = True
        closes = self._ending if self._closes else None
        if closes is not None:
            closes.narrow(forbidden)
        accepting = self._automaton.is_accepting()
        self.complete = accepting and (closes is not None or bool(forbidden.all()))
        if accepting:
            forbidden[self._ends] = False
        if self._prelude is not None and self._prelude.takes_blanks:
            forbidden[self._vocabulary.blank] = False
        return forbidden


class Prelude:
    """Free text before the form, up to a text such as "</think>" and whitespace after it."""

    def __init__(self, vocabulary: Vocabulary, last: bytes) -> None:
        """`last` are the bytes with which it ends."""
        self._vocabulary, self._last = vocabulary, last
        self._begun = b""
        """The prefix of `last` that has been read."""
        self.open = True
        """Whether `last` has not been read yet."""
        self._blanks = 0
        """The tokens of whitespace after `last`; at `_MOST_BLANK` no more are allowed."""

    def takes(self, token: int) -> bool:
        """Add a token; return whether it belongs to the prelude and not to the form."""
        word = self._vocabulary.words[token]
        if not self.open:
            blank = self.takes_blanks and bool(word) and not word.strip(BLANK)
            self._blanks = self._blanks + 1 if blank else _MOST_BLANK
            return blank
        text = self._begun + word
        self.open = self._last not in text
        self._begun = self._last[: overlap(text, self._last)]
        return True

    @property
    def takes_blanks(self) -> bool:
        """Whether whitespace may follow that is not part of the form."""
        return self._blanks < _MOST_BLANK

    def forbidden(self) -> np.ndarray:
        """Return the tokens that end the sequence, and those that extend into the form."""
        forbidden = np.zeros(self._vocabulary.size, np.bool_)
        forbidden[self._vocabulary.ends] = True
        forbidden[self._vocabulary.crossing(self._begun, self._last)] = True
        return forbidden
