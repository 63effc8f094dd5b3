"""The form `prompt:8` of guesses from the text so far."""

from __future__ import annotations

from tpcompile.errors import UsageError

MOST_GUESSES = 8
"""The maximum number of guesses of a step by default."""


def takes_prompt(text: str) -> bool:
    """Return whether guesses are those from the text; otherwise, they name a draft model."""
    return text.partition(":")[0] == "prompt"


def prompt_guesses(text: str) -> int:
    """Return the number of guesses in `prompt:8`, by default 8."""
    number = text.partition(":")[2]
    valid = not number or (number.isdecimal() and 1 <= int(number) <= 15)
    if not takes_prompt(text) or not valid:
        raise UsageError(
            "Guesses from the text must be prompt:N, with N from 1 to 15", got=repr(text)
        )
    return int(number) if number else MOST_GUESSES
