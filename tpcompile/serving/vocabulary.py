"""The tokens of a model, as bytes for grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tpcompile.errors import UnsupportedError, UsageError

BLANK = b" \t\n\r"
"""The bytes of whitespace."""
_OPENERS = frozenset((b"{", b"[", b" ", b"\t", b"\n", b"\r"))


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
        self.words = [self.lexicon.decode_bytes([token]) for token in range(size)]
        """The bytes of each token."""
        self.single = {word: token for token, word in enumerate(self.words) if len(word) == 1}
        """The tokens that consist of a single byte."""
        self.blank = self._tokens_where(lambda word: bool(word) and not word.strip(BLANK))
        """The tokens that consist of whitespace."""
        self.opening = self._tokens_where(lambda word: word[:1] in _OPENERS)
        """The tokens that open an object or an array, or begin with whitespace."""
        self._crossing: dict[tuple[bytes, bytes], np.ndarray] = {}

    def crossing(self, begun: bytes, text: bytes) -> np.ndarray:
        """Return the tokens that complete a text and continue with other text than whitespace.

        `begun` is the part of the text so far.
        """
        tokens = self._crossing.get((begun, text))
        if tokens is None:

            def crosses(word: bytes) -> bool:
                _, completed, remainder = (begun + word).partition(text)
                return bool(completed) and bool(remainder.strip(BLANK))

            tokens = self._crossing[begun, text] = self._tokens_where(crosses)
        return tokens

    def _tokens_where(self, fits: Callable[[bytes], bool]) -> np.ndarray:
        """Return the tokens whose bytes satisfy a condition."""
        return np.array([token for token, word in enumerate(self.words) if fits(word)], np.int64)


def _library() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise UsageError(
            "Structured output needs llguidance", hint="Run `pip install 'tpcompile[serve]'`"
        ) from error
    return llguidance
