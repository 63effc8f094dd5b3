"""Reader of the JSON objects in a checkpoint, with errors that locate the fault."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DEEPEST = 100
"""The maximum nesting, so that recursive code over a configuration does not overflow the stack."""

_LONGEST = 120


class JsonError(ValueError):
    """A file without a usable JSON object. The message fits after "Found"."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in this file; raise JsonError, or OSError if it cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise JsonError(f"invalid JSON at {where}: {error.msg}") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # not UTF-8, or a number with thousands of digits
        raise JsonError(f"invalid JSON: {shortened(str(error))}") from error
    if not isinstance(document, dict):
        raise JsonError(f"a JSON {type(document).__name__} instead of an object")
    _check_depth(document)
    return document


def shortened(text: str) -> str:
    """Escape text from a file for use in a message, and truncate it if it is very long."""
    shown = text if text.isprintable() else ascii(text)
    if len(shown) <= _LONGEST:
        return shown
    return f"{shown[:_LONGEST]}… ({len(text):,} characters)"


def _check_depth(value: Any) -> None:
    level, depth = [value], 1
    while level := [inner for outer in level for inner in _inside(outer)]:
        depth += 1
        if depth > DEEPEST:
            raise _too_deep()


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> JsonError:
    return JsonError(f"JSON nested more than {DEEPEST} levels deep")
