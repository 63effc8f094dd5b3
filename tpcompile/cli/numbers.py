"""Argument types for real numbers and for lists of integers."""

from __future__ import annotations

import argparse
import math
import re

from tpcompile.cli.command import number


def relative_error(text: str) -> float:
    """Parse a relative error: at least 0 and less than 1."""
    value = _float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(
            f"the relative error must be at least 0 and less than 1, got {text!r}"
        )
    return value


def fraction(text: str) -> float:
    """Parse a fraction: more than 0 and at most 1."""
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"the value must be more than 0 and at most 1, got {text!r}"
        )
    return value


def temperature(text: str) -> float:
    """Parse a sampling temperature: a finite number of at least 0."""
    value = _float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"the temperature must be a finite number of at least 0, got {text!r}"
        )
    return value


def lengths(text: str) -> tuple[int, ...]:
    """Parse positive integers separated by commas."""
    return _all(text, 1, "each length")


def token_ids(text: str) -> tuple[int, ...]:
    """Parse non-negative integers separated by commas."""
    return _all(text, 0, "each token id")


def layer_range(text: str) -> tuple[int, int]:
    """Parse a range of layers A:B, which has at least one layer and ends before B."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(
            f"the layers must be A:B with A less than B, such as 0:2, got {text!r}"
        )
    return int(match[1]), int(match[2])


def _all(text: str, least: int, subject: str) -> tuple[int, ...]:
    read = number(least, subject)
    return tuple(read(part.strip()) for part in text.split(","))


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
