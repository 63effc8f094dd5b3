"""Lines of a program's text, and errors that cite their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tpcompile.errors import UsageError, did_you_mean
from tpcompile.vm.program.text.values import valued

_WORDS = re.compile(r'#.*|"(?:[^"\\]|\\.)*"|[^\s"#]+|"')
_T = TypeVar("_T")


@dataclass(frozen=True)
class Line:
    """A line as words, without its comment."""

    number: int
    words: Sequence[str]

    def refusal(
        self, message: str, got: str = "", expected: str = "", hint: str = ""
    ) -> UsageError:
        return UsageError(
            message, where=f"line {self.number}", got=got, expected=expected, hint=hint
        )

    def read(self, noun: str, word: str, reader: Callable[[str], _T]) -> _T:
        """Parse a word. Raise a UsageError with the expected form if it is not valid."""
        try:
            return reader(word)
        except ValueError as error:
            raise self.refusal(
                _not_understood(noun), got=repr(word), expected=str(error)
            ) from error

    def word(self, place: int, noun: str) -> str:
        if place >= len(self.words):
            raise self.refusal(f"The line ends before the {noun}", got=" ".join(self.words))
        return self.words[place]

    def reference(self, word: str, letter: str, noun: str) -> int:
        """Return the number of a word such as `b3`, which must have this letter."""
        digits = word[1:]
        if word[:1] != letter or not digits.isascii() or not digits.isdigit() or len(digits) > 9:
            expected = f"a word such as {letter}0"
            raise self.refusal(_not_understood(noun), got=repr(word), expected=expected)
        return int(digits)

    def begin(self, letter: str, expected: int, noun: str) -> None:
        """Check that the line's own number is the expected one."""
        number = self.reference(self.word(0, noun), letter, noun)
        if number != expected:
            comes = "is repeated" if number < expected else "is out of order"
            raise self.refusal(
                f"The {noun} {letter}{number} {comes}",
                got=f"{letter}{number}",
                expected=f"{letter}{expected}, because numbers count from 0 in order",
            )

    def known(self, noun: str, name: str, table: Mapping[str, _T]) -> _T:
        if name not in table:
            raise self.refusal(f"There is no {noun} {name!r}", hint=did_you_mean(name, table))
        return table[name]

    def values(self, words: Sequence[str], types: Mapping[str, type]) -> dict[str, Any]:
        """Read `name=value` words, one for each name in `types`."""
        values: dict[str, Any] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                raise self.refusal(f"{word!r} has no value", expected="name=value")
            kind = self.known("operand", name, types)
            if name in values:
                raise self.refusal(f"The operand {name} is given twice", got=word)
            values[name] = self.read(f"value of {name}", value, partial(valued, kind))
        missing = [name for name in types if name not in values]
        if missing:
            raise self.refusal(
                "Operands are missing", got=" ".join(words), expected=", ".join(missing)
            )
        return values


def _not_understood(noun: str) -> str:
    """Return the message for a noun that may be plural: "instructions of a queue"."""
    several = noun.partition(" of ")[0].endswith("s")
    return f"The {noun} {'are' if several else 'is'} not valid"


def lines_of(text: str) -> Iterator[Line]:
    """Yield the non-blank, non-comment lines."""
    for number, line in enumerate(text.split("\n"), start=1):
        if '"' in line:
            tokens = _WORDS.findall(line)
            words = [word for word in tokens if not word.startswith("#")]
        else:
            words = line.partition("#")[0].split()
        if words:
            yield Line(number, words)
