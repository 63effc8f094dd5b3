"""The tokens of a model as grammars need them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from tpcompile.errors import UnsupportedError, UsageError

BLANK = b" \t\n\r"
"""The bytes of whitespace."""


class Vocabulary:
    """The tokens of a model, with their bytes."""

    def __init__(self, tokenizer: Any, size: int, ends: frozenset[int]) -> None:
        """`size` is that of the model, and `ends` are the tokens that end a sequence of it."""
        self.size, self.ends = size, np.array(sorted(ends), np.int64)
        self.library = _library()
        try:
            self.lexicon = self.library.hf.from_tokenizer(
                tokenizer, n_vocab=size, eos_token=sorted(ends) or None
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            raise UnsupportedError(
                "Structured output is not supported with this tokenizer", got=str(error)
            ) from error

    @cached_property
    def words(self) -> list[bytes]:
        """The bytes of each token."""
        return [self.lexicon.decode_bytes([token]) for token in range(self.size)]

    @cached_property
    def blank(self) -> np.ndarray:
        """The tokens that consist of whitespace."""
        blank = [token for token, word in enumerate(self.words) if word and not word.strip(BLANK)]
        return np.array(blank, np.int64)

    @cached_property
    def single(self) -> dict[bytes, int]:
        """The tokens that consist of a single byte."""
        return {word: token for token, word in enumerate(self.words) if len(word) == 1}

    @cached_property
    def opening(self) -> np.ndarray:
        """The tokens that open an object or an array, or begin with whitespace."""
        openers = (b"{", b"[", *(BLANK[place : place + 1] for place in range(len(BLANK))))
        opening = [token for token, word in enumerate(self.words) if word.startswith(openers)]
        return np.array(opening, np.int64)

    def crossing(self, begun: bytes, text: bytes) -> np.ndarray:
        """Return the tokens that complete a text and go on with something but whitespace.

        `begun` is the part of the text that has come.
        """
        tokens = self._crossing.get((begun, text))
        if tokens is None:
            tokens = np.array([*self._crossings(begun, text)], np.int64)
            self._crossing[begun, text] = tokens
        return tokens

    @cached_property
    def _crossing(self) -> dict[tuple[bytes, bytes], np.ndarray]:
        return {}

    def _crossings(self, begun: bytes, text: bytes) -> Iterator[int]:
        for token, word in enumerate(self.words):
            _, completed, rest = (begun + word).partition(text)
            if completed and rest.strip(BLANK):
                yield token


def _library() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise UsageError(
            "Structured output needs llguidance", hint="Run `pip install 'tpcompile[serve]'`"
        ) from error
    return llguidance
