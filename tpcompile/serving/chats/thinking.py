"""Separation of thinking from the text that follows it."""

from __future__ import annotations

from tpcompile.serving.chats.marks import END_OF_THINK, THINK
from tpcompile.serving.words import overlap


class Thinking:
    """A splitter of one continuation. The result does not depend on where the text is cut.

    Thinking begins with `<think>`, before any other text, or in the prompt. Whitespace before it
    and line breaks around the marks belong to the form.
    """

    def __init__(self, inside: bool = False) -> None:
        """With `inside`, the prompt ends within the thinking."""
        self.inside = inside
        """Whether the text so far ends within the thinking."""
        self._begins = not inside
        """Whether the text so far may be the beginning of the mark."""
        self._fresh = inside
        """Whether line breaks are skipped."""
        self._pending = ""

    def push(self, text: str) -> tuple[str, str]:
        """Read more text; return the new thinking and the new text after it."""
        text, self._pending = self._pending + text, ""
        if self._begins:
            mark = text.lstrip()
            if THINK.startswith(mark) and mark != THINK:
                self._pending = text
                return "", ""
            self._begins = False
            if mark.startswith(THINK):
                self.inside = self._fresh = True
                text = mark[len(THINK) :]
        if not self.inside:
            return "", self._unpadded(text)
        text = self._unpadded(text)
        place = text.find(END_OF_THINK)
        end = len(text) - overlap(text, END_OF_THINK) if place < 0 else place
        thought = text[:end].rstrip("\n")
        if place < 0:
            self._pending = text[len(thought) :]
            return thought, ""
        self.inside, self._fresh = False, True
        return thought, self._unpadded(text[place + len(END_OF_THINK) :])

    def end(self) -> tuple[str, str]:
        """Return the rest, at the end of the text."""
        remainder, self._pending = self._pending, ""
        return (remainder.rstrip("\n"), "") if self.inside else ("", remainder)

    def _unpadded(self, text: str) -> str:
        """Return text without the line breaks that belong to the mark before it."""
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text
