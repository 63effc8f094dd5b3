"""Argument types of the benchmarks."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """Parse an integer of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return number
