"""Argument types for numbers that are not whole, and for lists of numbers."""

from __future__ import annotations

import argparse
import math

from tpcompile.cli.command import number


def relative_error(text: str) -> float:
    """0 to 1, 1 not included."""
    value = _float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a relative error: give 0 to 1")
    return value


def fraction(text: str) -> float:
    """0 to 1, 0 not included."""
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: give 0 to 1")
    return value


def positive(text: str) -> float:
    """More than 0."""
    value = _float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} will not do: give a number above 0")
    return value


def lengths(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, with commas between."""
    return _all(text, 1, "a length")


def token_ids(text: str) -> tuple[int, ...]:
    """Whole numbers from 0 on, with commas between."""
    return _all(text, 0, "a token")


def _all(text: str, least: int, what: str) -> tuple[int, ...]:
    read = number(least, what)
    return tuple(read(part.strip()) for part in text.split(","))


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
