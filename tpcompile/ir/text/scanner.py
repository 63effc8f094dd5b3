"""A scanner of one line of a graph's text. Its errors cite the line."""

from __future__ import annotations

import json
import re

from tpcompile.errors import UsageError
from tpcompile.ir.text.words import BARE, QUOTED

MOST_DIGITS = 10
"""The maximum number of digits of an extent or a count."""

_INTEGER = re.compile(r"0|[1-9][0-9]*")
_SHOWN = 60
"""The maximum number of characters of a line in an error."""


class Scanner:
    """The text of a line, read from left to right."""

    def __init__(self, number: int, line: str) -> None:
        self.number = number
        self.text = line.strip()
        self.indent = len(line) - len(line.lstrip())
        self.place = 0

    def refusal(self, message: str, expected: str = "", hint: str = "") -> UsageError:
        """Return an error that shows the text from here on."""
        remaining = self.text[self.place :]
        shown = remaining if len(remaining) <= _SHOWN else remaining[:_SHOWN] + "…"
        where = f"line {self.number}, column {self.indent + self.place + 1}"
        got = repr(shown) if remaining else "the end of the line"
        return UsageError(message, where=where, got=got, expected=expected, hint=hint)

    def at_end(self) -> bool:
        return self.place == len(self.text)

    def sees(self, word: str) -> bool:
        return self.text.startswith(word, self.place)

    def accept(self, word: str) -> bool:
        """Skip a word if it comes next."""
        is_next = self.sees(word)
        self.place += len(word) if is_next else 0
        return is_next

    def expect(self, word: str) -> None:
        if not self.accept(word):
            raise self.refusal("The line is not valid", expected=repr(word))

    def expect_end(self) -> None:
        if not self.at_end():
            raise self.refusal("The line has unexpected text", expected="the end of the line")

    def match(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        """Read text that matches a pattern."""
        match = pattern.match(self.text, self.place)
        if match is None:
            raise self.refusal("The line is not valid", expected=expected)
        self.place = match.end()
        return match

    def rest(self) -> str:
        """Read the rest of the line."""
        remaining = self.text[self.place :]
        self.place = len(self.text)
        return remaining

    def integer(self, expected: str) -> int:
        """Read an integer of at least 0."""
        start = self.place
        digits = self.match(_INTEGER, expected).group()
        if len(digits) > MOST_DIGITS:
            self.place = start
            raise self.refusal(f"A number must have at most {MOST_DIGITS} digits", expected)
        return int(digits)

    def name(self, expected: str) -> str:
        """Read a name, which may be quoted."""
        if not self.sees('"'):
            return self.match(BARE, expected).group()
        start = self.place
        quoted = self.match(QUOTED, expected).group()
        try:
            name: str = json.loads(quoted)
        except ValueError as error:
            self.place = start
            raise self.refusal("A quoted name is not valid", "a string as in JSON") from error
        return name

    def integers(self, close: str, expected: str) -> tuple[int, ...]:
        """Read integers between commas up to a closing word."""
        if self.accept(close):
            return ()
        numbers = [self.integer(expected)]
        while not self.accept(close):
            self.expect(", ")
            numbers.append(self.integer(expected))
        return tuple(numbers)
