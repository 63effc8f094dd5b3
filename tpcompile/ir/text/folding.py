"""Lists of names in the text of a graph, with ranges of numbers: `%l{0..3,5}_q`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tpcompile.alike import texts_of_runs

MOST_NAMES = 1 << 16
"""The maximum number of names of one range, so that a damaged number does not fill the memory."""

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")
_FOLDED = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})(?:\.\.(0|[1-9][0-9]{0,8}))?")


def folded(names: Iterable[str]) -> list[str]:
    """Fold names that differ only in their first number, such as that of a layer."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = _NUMBER.search(name)
        ends = (name[: match.start()], name[match.end() :]) if match else (name, "")
        groups.setdefault(ends, []).extend([int(match.group())] if match else [])
    return [f"{first}{_numbers(numbers)}{last}" for (first, last), numbers in groups.items()]


def _numbers(numbers: list[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    spans = texts_of_runs(numbers, "..")
    return "{" + ",".join(spans) + "}"


def unfolded(text: str) -> list[str]:
    """Return the names that a folded name stands for. Raise ValueError if it is not valid."""
    match = _FOLDED.search(text)
    if match is None:
        return [text]
    numbers: list[int] = []
    for part in match.group(1).split(","):
        span = _RANGE.fullmatch(part)
        if span is None:
            raise ValueError("numbers such as {0..3,5}")
        first, last = int(span.group(1)), int(span.group(2) or span.group(1))
        if last - first >= MOST_NAMES:
            raise ValueError(f"at most {MOST_NAMES:,} names")
        numbers += range(first, last + 1)
    return [f"{text[: match.start()]}{number}{text[match.end() :]}" for number in numbers]
