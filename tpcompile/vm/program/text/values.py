"""The elements of the text form: names of instructions and operands, and values as one word."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

from tpcompile.ir.format import Format
from tpcompile.vm.program.buffer import Role
from tpcompile.vm.program.fields import flat_fields, operands_of
from tpcompile.vm.program.instruction import NONE, Range, to_fp32
from tpcompile.vm.program.instruction_set import INSTRUCTIONS

SECTIONS = ("buffers", "operands", "instructions", "queues")
"""The sections after the program's first line, in order."""

ROLES: Mapping[str, Role] = {role.word: role for role in Role}

INT32 = range(-(2**31), 2**31)
"""The values that fit in a word of the encoding."""

_PLAIN = re.compile(r"[A-Za-z0-9_./:+-]+")
_WHOLE = re.compile(r"-?[0-9]{1,10}")


def operands_name(kind: type) -> str:
    """Return the name of an operand class in text: `qkv` for `QkvOperands`."""
    words = re.findall(r"[A-Z][a-z0-9]*", kind.__name__.removesuffix("Operands"))
    return "_".join(words).lower()


def operand_types(operands: Any) -> Mapping[str, type]:
    """Return the fields of shared operands; a nested field is named `outer.inner`."""
    return dict(flat_fields(operands))


def operand_kinds() -> Mapping[str, type]:
    """Return the classes of shared operands by their names in text."""
    kinds = dict.fromkeys(operands_of(kind) for kind in INSTRUCTIONS.values())
    return {operands_name(kind): kind for kind in kinds}


def name_word(name: str) -> str:
    """Format a name as one word, in quotes if it has spaces or special characters."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name).replace("#", "\\u0023")


def named(word: str) -> str:
    """Parse a name. Raise ValueError with the expected form."""
    if not word.startswith('"'):
        if _PLAIN.fullmatch(word):
            return word
        raise ValueError('a name, in "quotes" if it has spaces or special characters')
    try:
        return str(json.loads(word))
    except ValueError as error:
        raise ValueError("a name in quotes, with the escapes of JSON") from error


def value_word(value: Any) -> str:
    """Format the value of an operand as one word."""
    if isinstance(value, Range):
        return f"{value.start}:{value.stop}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, float):
        return _short(value)
    return "none" if value == NONE else str(value)


def valued(kind: type, word: str) -> Any:
    """Parse a value of this type. Raise ValueError with the expected form."""
    if kind is Range:
        return interval(word)
    if kind is bool:
        return chosen(word, {"true": True, "false": False})
    if issubclass(kind, IntEnum):
        return chosen(word, {member.name.lower(): member for member in kind})
    if kind is float:
        return _real(word)
    if kind is Format:
        return Format.parsed(word)
    return NONE if word == "none" else whole(word)


def whole(word: str) -> int:
    """Parse a 32-bit integer."""
    if not _WHOLE.fullmatch(word) or int(word) not in INT32:
        raise ValueError("a 32-bit integer")
    return int(word)


@lru_cache(maxsize=4096)
def interval(word: str) -> Range:
    start, separator, stop = word.partition(":")
    if not separator:
        raise ValueError("a range such as 0:16")
    return Range(whole(start), whole(stop))


def chosen(word: str, known: Mapping[str, Any]) -> Any:
    if word not in known:
        raise ValueError(" or ".join(known))
    return known[word]


@lru_cache(maxsize=256)
def _short(value: float) -> str:
    """Return the shortest decimal that rounds to the same fp32 number."""
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next((text for text in texts if _rounds_to(text, value)), repr(value))


def _rounds_to(text: str, value: float) -> bool:
    try:
        return to_fp32(float(text)) == value
    except OverflowError:
        return False


def _real(word: str) -> float:
    try:
        number = to_fp32(float(word))
    except (ValueError, OverflowError) as error:
        raise ValueError("a 32-bit number such as 0.125") from error
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


def shape_word(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def shaped(word: str) -> tuple[int, ...]:
    if not (word.startswith("[") and word.endswith("]")):
        raise ValueError("a shape such as [4,64]")
    inner = word[1:-1]
    extents = tuple(map(whole, inner.split(","))) if inner else ()
    if any(extent < 0 for extent in extents):
        raise ValueError("a shape whose extents are at least 0")
    return extents


def runs_of(numbers: Sequence[int]) -> Iterator[str]:
    """Yield words for numbers in order: evenly spaced runs as `start:stop:step`."""
    place = 0
    while place < len(numbers):
        end = _even_until(numbers, place)
        step = numbers[place + 1] - numbers[place] if end > place + 1 else 0
        if end - place < (3 if step == 1 else 4):
            yield str(numbers[place])
            place += 1
            continue
        stop = numbers[end - 1] + (1 if step > 0 else -1)
        yield f"{numbers[place]}:{stop}" + ("" if step == 1 else f":{step}")
        place = end


def _even_until(numbers: Sequence[int], place: int) -> int:
    """Return the end of the evenly spaced run that begins at `place`."""
    end = place + 1
    while (
        end < len(numbers)
        and (step := numbers[place + 1] - numbers[place])
        and numbers[end] - numbers[end - 1] == step
    ):
        end += 1
    return end


def run_of(word: str) -> range:
    """Parse one word of a queue: a number or a run of numbers."""
    parts = [whole(part) for part in word.split(":")]
    if len(parts) == 1:
        return range(parts[0], parts[0] + 1)
    if len(parts) > 3 or (len(parts) == 3 and parts[2] == 0):
        raise ValueError("a number, start:stop or start:stop:step")
    return range(*parts)
