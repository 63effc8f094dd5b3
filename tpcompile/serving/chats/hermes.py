"""Calls as JSON objects with a name and arguments, as Qwen2.5, Qwen3 and Hermes write them."""

from __future__ import annotations

import json
import re
from typing import Any

from tpcompile.serving.chats.calls import Tools
from tpcompile.serving.chats.events import Arguments, Begin, Complete, Event

_BEFORE = re.compile(r"[ \t\r\n]+")
_OUTSIDE = re.compile(r"[ \t\r\n:,0-9+\-.eEtrufalsn]+")
_IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])+')
"""JSON before an object, and between brackets and quotes outside and inside of strings."""
_HALVES = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON may contain as escapes."""


class JsonCall:
    """A reader of `{"name": …, "arguments": {…}}`.

    If the name comes first, the arguments are streamed in the model's own spelling. Otherwise they
    follow at the end of the object.
    """

    def __init__(self, tools: Tools) -> None:
        self._json: list[str] = []
        """The text of the object, in parts that end at brackets and quotes."""
        self._brackets = _Brackets()
        self._arguments: tuple[int, int] | None = None
        """The first part of the arguments, and the one after them, or 0 before their end."""
        self._looked = False
        """Whether the first value that is an object has begun."""
        self._sent = 0
        """The parts of `_json` before which all are in events, or stand for the name."""

    @property
    def unsent(self) -> str:
        """The end of the text read so far, which is in no event."""
        return "".join(self._json[self._sent :])

    def read(self, text: str) -> tuple[list[Event], int | None]:
        """Read more text; return its events, and the characters read if the call ends there."""
        events: list[Event] = []
        place = 0
        while place < len(text):
            depth = self._brackets.depth
            end = self._brackets.take(text, place)
            if end == place:
                return self._passed_on(events), place
            self._json.append(text[place:end])
            if depth == 1 and text[end - 1] == "{" and self._brackets.depth == 2:
                self._begin_value(events)
            elif depth == 2 and self._brackets.depth == 1 and not self._end_value():
                return self._passed_on(events), end
            elif depth == 1 and self._brackets.depth == 0:
                return self._end(self._passed_on(events)), end
            place = end
        return self._passed_on(events), None

    def _begin_value(self, events: list[Event]) -> None:
        """Notice the beginning of the arguments, after the name."""
        if self._looked:
            return
        self._looked = True
        call = _object("".join(self._json) + "}}")
        name = _name(call)
        if name is not None and list(call)[-1] == "arguments":
            self._sent = len(self._json) - 1
            self._arguments = self._sent, 0
            events.append(Begin(name))

    def _end_value(self) -> bool:
        """Notice the end of the arguments; return whether they are a JSON object."""
        if self._arguments is None or self._arguments[1]:
            return True
        first, end = self._arguments[0], len(self._json)
        self._arguments = first, end
        return _object("".join(self._json[first:end])) is not None

    def _passed_on(self, events: list[Event]) -> list[Event]:
        """Add the arguments that are in no event yet."""
        if self._arguments is not None:
            end = self._arguments[1] or len(self._json)
            if self._sent < end:
                events.append(Arguments("".join(self._json[self._sent : end])))
                self._sent = end
        return events

    def _end(self, events: list[Event]) -> list[Event]:
        """Add the end of the call if the object is one."""
        call = _object("".join(self._json))
        name = _name(call)
        if name is None:
            return events
        arguments = call.get("arguments", {})
        if self._arguments is None:
            if not isinstance(arguments, dict):
                return events
            return [*events, Begin(name), Arguments(json.dumps(arguments)), Complete()]
        return [*events, Complete()]


class _Brackets:
    """The depth of brackets in JSON. `json.loads` checks everything else."""

    def __init__(self) -> None:
        self.depth = 0
        self._string = self._escaped = False

    def take(self, text: str, place: int) -> int:
        """Read a bracket or a quote, or all up to the next one; return where that ends.

        It ends where it begins if JSON has no such character there.
        """
        char = text[place]
        if self._escaped:
            self._escaped = False
            return place + (char >= " ")
        pattern = _IN_STRING if self._string else _OUTSIDE if self.depth else _BEFORE
        if run := pattern.match(text, place):
            return run.end()
        if self._string:
            self._string = self._escaped = char == "\\"
            return place + (char in '"\\')
        if char not in ('{}[]"' if self.depth else "{"):
            return place
        self._string = char == '"'
        self.depth += (char in "{[") - (char in "}]")
        return place + 1


def _object(text: str) -> Any:
    """Return a JSON object; None if the text is not one, or names a key of it twice."""
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("A key occurs twice")
    return value


def _name(call: Any) -> str | None:
    """Return the name in a call; None if it has none that UTF-8 can encode."""
    name = call.get("name") if call else None
    return name if isinstance(name, str) and name and not _HALVES.search(name) else None
