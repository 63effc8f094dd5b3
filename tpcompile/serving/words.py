"""The incremental text of new tokens, up to a stop text."""

from __future__ import annotations

from typing import Any, AnyStr

_INCOMPLETE = "\ufffd"
"""The character that tokenizers return for an incomplete one."""


class Words:
    """The text of a continuation. Text that may be the beginning of a stop text is held back."""

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...] = (), shown: tuple[int, ...] = ()
    ) -> None:
        """Leave out special tokens, except those of `shown`."""
        self._tokenizer, self._stop = tokenizer, stop
        self._hidden = _special(tokenizer) - set(shown) if shown else frozenset()
        self._tokens: list[int] = []
        self._prefix, self._read = 0, 0
        """Tokens from `prefix` on are decoded again with each new one; tokens before `read` have
        been returned, and are context for spaces."""
        self._pending = ""
        self.stopped = False
        """Whether a stop text was found."""

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes."""
        self._tokens.append(token)
        before = self._decode(self._prefix, self._read)
        whole = self._decode(self._prefix, len(self._tokens))
        if len(whole) <= len(before) or whole.endswith(_INCOMPLETE):
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return self._passed_on(whole[len(before) :])

    def end(self) -> str:
        """Return the text that was held back, after the last token."""
        remainder, self._pending = self._pending, ""
        if self.stopped:
            return ""
        before = self._decode(self._prefix, self._read)
        return remainder + self._decode(self._prefix, len(self._tokens))[len(before) :]

    def _passed_on(self, text: str) -> str:
        whole = self._pending + text
        stops = [place for place in map(whole.find, self._stop) if place >= 0]
        if stops:
            self.stopped, self._pending = True, ""
            return whole[: min(stops)]
        held = max((overlap(whole, stop) for stop in self._stop), default=0)
        self._pending = whole[len(whole) - held :]
        return whole[: len(whole) - held]

    def _decode(self, first: int, last: int) -> str:
        tokens, skips = self._tokens[first:last], not self._hidden
        if not skips:
            tokens = [token for token in tokens if token not in self._hidden]
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skips)
        return text


def _special(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that a tokenizer omits from texts."""
    added = tokenizer.added_tokens_decoder
    return frozenset(token for token, entry in added.items() if entry.special)


def overlap(text: AnyStr, mark: AnyStr) -> int:
    """Return the length of the longest suffix of a text that is a prefix of a mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
