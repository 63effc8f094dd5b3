"""Formatting of results. Benchmarks print only the result on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any


def write_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def spread(seconds: Sequence[float]) -> str:
    """Format the median of several runs, with the minimum and the maximum."""
    return f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
