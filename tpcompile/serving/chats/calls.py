"""Tool calls within a text, parsed incrementally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tpcompile.serving.chats.events import Begin, Broken, Complete, Event, Text
from tpcompile.serving.words import overlap

Tools = list[dict[str, Any]]
"""The functions of a request: each has a `name`, and may have `parameters`, a JSON schema."""


class ToolParser(Protocol):
    """A parser of one continuation. The events do not depend on where the text is cut."""

    def push(self, text: str) -> list[Event]:
        """Read more text; return its events."""

    def end(self) -> list[Event]:
        """Return the last events, at the end of the text."""


class Reader(Protocol):
    """A reader of one call, without the marks around it."""

    @property
    def unsent(self) -> str:
        """The end of the text read so far, which is in no event."""

    def read(self, text: str) -> tuple[list[Event], int | None]:
        """Read more text; return its events, and the characters read if the call ends there.

        The last event of a complete call is `Complete`. A call without it has lost its form at the
        first character that was not read.
        """


class MarkedCalls:
    """Calls between two marks, and the text around them.

    Whitespace directly before a call, and after the last one, belongs to the form. A call is
    complete when its reader says so. Its closing mark may be missing.
    """

    def __init__(self, reader: Callable[[], Reader], begin: str, end: str) -> None:
        self._reader, self._begin, self._end = reader, begin, end
        self._pending = ""
        """Text that may belong to a mark, or whitespace that may belong to the form."""
        self._call: Reader | None = None
        self._whole: list[str] = []
        """The text of the current call, with its first mark and the whitespace before."""
        self._sent = False
        """Whether a `Begin` event was emitted for the current call."""
        self._closing = self._called = False
        """Whether the closing mark may follow, and whether no text has followed the last call."""

    def push(self, text: str) -> list[Event]:
        """Read more text; return its events."""
        events: list[Event] = []
        text, self._pending = self._pending + text, ""
        while text:
            if self._call is not None:
                text = self._inside(self._call, text, events)
            elif self._closing:
                text = self._after(text)
            else:
                text = self._outside(text, events)
        return events

    def end(self) -> list[Event]:
        """Return the last events, at the end of the text."""
        if self._call is not None:
            return [self._broken(self._call)]
        remainder = "" if self._closing else self._pending
        if self._called and not remainder.strip():
            remainder = ""
        return [Text(remainder)] if remainder else []

    def _outside(self, text: str, events: list[Event]) -> str:
        """Read text up to the next call; return what follows its first mark."""
        place = text.find(self._begin)
        end = len(text) - overlap(text, self._begin) if place < 0 else place
        before = text[:end].rstrip()
        if before:
            events.append(Text(before))
            self._called = False
        if place < 0:
            self._pending = text[len(before) :]
            return ""
        after = place + len(self._begin)
        self._call, self._sent, self._whole = self._reader(), False, [text[len(before) : after]]
        return text[after:]

    def _inside(self, call: Reader, text: str, events: list[Event]) -> str:
        """Read text of a call; return what follows it."""
        read, count = call.read(text)
        events += read
        self._sent = self._sent or any(isinstance(event, Begin) for event in read)
        self._whole.append(text[:count])
        if count is None:
            return ""
        if read and isinstance(read[-1], Complete):
            self._call, self._closing, self._called = None, True, True
        else:
            events.append(self._broken(call))
        return text[count:]

    def _broken(self, call: Reader) -> Event:
        whole, self._call, self._called = "".join(self._whole), None, False
        return Broken(whole, call.unsent if self._sent else whole)

    def _after(self, text: str) -> str:
        """Read the mark after a complete call; return what follows it, or all if it is missing."""
        mark = text.lstrip()
        if mark.startswith(self._end):
            self._closing = False
            return mark[len(self._end) :]
        if self._end.startswith(mark):
            self._pending = text
            return ""
        self._closing = False
        return text
