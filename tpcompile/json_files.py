"""JSON files that come with a checkpoint: an object, or an error that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DEEPEST = 100
"""Levels of nesting; code that walks a configuration recursively must not run out of stack."""

_LONGEST = 120


class JsonError(ValueError):
    """The file holds no usable JSON object."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in this file; raise JsonError, or OSError if it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise JsonError(f"Invalid JSON at {where}: {error.msg}") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # not UTF-8, or a number of thousands of digits
        raise JsonError(f"Invalid JSON: {shortened(str(error))}") from error
    if not isinstance(found, dict):
        raise JsonError(f"A JSON {type(found).__name__} in place of an object")
    _check_depth(found)
    return found


def shortened(text: str) -> str:
    """A name from a file, for a message: escaped, and cut if it is very long."""
    shown = text if text.isprintable() else ascii(text)
    if len(shown) <= _LONGEST:
        return shown
    return f"{shown[:_LONGEST]}… ({len(text):,} characters)"


def _check_depth(value: Any) -> None:
    level, depth = [value], 1
    while level := [inner for each in level for inner in _inside(each)]:
        depth += 1
        if depth > DEEPEST:
            raise _too_deep()


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> JsonError:
    return JsonError(f"JSON that is nested more than {DEEPEST} levels deep")
