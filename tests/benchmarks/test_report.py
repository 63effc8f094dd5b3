"""Tests of reports on several runs."""

from __future__ import annotations

from benchmarks.report import spread


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.254]) == "2.25 (1.00 to 3.00)"
