"""Calls with an element per parameter, as Qwen3-Coder and Qwen3.5 write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tpcompile.serving.chats.calls import Tools
from tpcompile.serving.chats.events import Arguments, Begin, Complete, Event
from tpcompile.serving.chats.values import is_text, json_of, string_of
from tpcompile.serving.words import overlap

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_OF_FUNCTION, _END_OF_PARAMETER = "</function>", "</parameter>"
_NEXT = (_PARAMETER, _END_OF_FUNCTION)
"""Elements that may follow a parameter."""
_NAME = re.compile(r"[^<>\n]+")


class ElementCall:
    """A reader of `<function=NAME>`, an element `<parameter=NAME>` for each value, `</function>`.

    The schema of the function says which values are JSON. All others are text, which is streamed. A
    value ends where another element follows, so it may contain `</parameter>`.
    """

    def __init__(self, tools: Tools) -> None:
        self._schemas = {tool["name"]: tool.get("parameters") for tool in tools}
        self._schema: Any = None
        self._step: Callable[[], bool] = self._read_function
        """The next state of the parser; it returns False if it needs more text."""
        self._tail = ""
        """The unread text."""
        self._read: list[str] = []
        """The text that was read, and is in no event yet."""
        self._events: list[Event] = []
        self._names: set[str] = set()
        """The parameters so far."""
        self._name = self._key = ""
        """The parameter whose value is being read, and how its entry in the arguments begins."""
        self._value: list[str] | None = None
        """The value so far, unless it is streamed."""
        self._end: int | None = None
        """The end of the call in the tail, whether complete or broken."""

    @property
    def unsent(self) -> str:
        """The end of the text read so far, which is in no event."""
        return "".join(self._read) + self._tail

    def read(self, text: str) -> tuple[list[Event], int | None]:
        """Read more text; return its events, and the characters read if the call ends there."""
        self._tail += text
        self._events = []
        while self._step():
            pass
        if self._end is None:
            return self._events, None
        left = len(self._tail) - self._end
        self._tail = self._tail[: self._end]
        return self._events, len(text) - left

    def _read_function(self) -> bool:
        if not self._mark(_FUNCTION):
            return False
        self._step = self._read_function_name
        return True

    def _read_function_name(self) -> bool:
        name = self._until_bracket()
        if not name:
            return False
        self._schema = self._schemas.get(name)
        self._send(Begin(name))
        self._step = self._read_element
        return True

    def _read_element(self) -> bool:
        mark = self._mark(*_NEXT)
        if mark == _END_OF_FUNCTION:
            self._send(Arguments("}" if self._names else "{}"), Complete())
            self._end = 0
        if mark != _PARAMETER:
            return False
        self._step = self._read_parameter_name
        return True

    def _read_parameter_name(self) -> bool:
        name = self._until_bracket()
        if name in self._names:
            self._end = 0
        if not name or name in self._names:
            return False
        self._key = f"{', ' if self._names else '{'}{string_of(name)}: "
        self._names.add(name)
        self._name, self._value = name, None
        if is_text(self._schema, name):
            self._send(Arguments(f'{self._key}"'))
        else:
            self._value = []
        self._step = self._read_line_break
        return True

    def _read_line_break(self) -> bool:
        """Read the line break before a value, which belongs to the form."""
        if not self._tail:
            return False
        if self._tail.startswith("\n"):
            self._take(1)
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        end, ends = self._end_of_value()
        text = self._take(end)
        if self._value is not None:
            self._value.append(text)
        elif text:
            self._send(Arguments(string_of(text)[1:-1]))
        if not ends:
            return False
        self._mark(_END_OF_PARAMETER)
        if self._value is None:
            self._send(Arguments('"'))
        else:
            value = "".join(self._value)
            self._send(Arguments(self._key + json_of(self._schema, self._name, value)))
        self._step = self._read_element
        return True

    def _end_of_value(self) -> tuple[int, bool]:
        """Return the length of the tail that is surely value, and whether the value ends there."""
        tail, start = self._tail, 0
        while (place := tail.find(_END_OF_PARAMETER, start)) >= 0:
            start = place + len(_END_OF_PARAMETER)
            after = tail[start:].lstrip()
            ends = after.startswith(_NEXT)
            if ends or any(mark.startswith(after) for mark in _NEXT):
                return place - tail.endswith("\n", 0, place), ends
        held = max(overlap(tail, mark) for mark in ("\n" + _END_OF_PARAMETER, _END_OF_PARAMETER))
        return len(tail) - held, False

    def _mark(self, *marks: str) -> str:
        """Read one of some marks, with whitespace before it; return it, or an empty string."""
        body = self._tail.lstrip()
        space = len(self._tail) - len(body)
        for mark in marks:
            if body.startswith(mark):
                self._take(space + len(mark))
                return mark
        common = max(_common_length(body, mark) for mark in marks)
        if common < len(body):
            self._end = space + common
        return ""

    def _until_bracket(self) -> str:
        """Read a name and the bracket after it; return it, or an empty string."""
        match = _NAME.match(self._tail)
        length = 0 if match is None else match.end()
        if length == len(self._tail):
            return ""
        if not length or self._tail[length] != ">":
            self._end = length
            return ""
        return self._take(length + 1)[:length]

    def _take(self, count: int) -> str:
        text, self._tail = self._tail[:count], self._tail[count:]
        self._read.append(text)
        return text

    def _send(self, *events: Event) -> None:
        """Add events for all text that was read."""
        self._events += events
        self._read = []


def _common_length(text: str, mark: str) -> int:
    """Return the length of the common prefix of a text and a mark."""
    pairs = enumerate(zip(text, mark, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(text), len(mark)))
