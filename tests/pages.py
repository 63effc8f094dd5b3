"""The pages of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

_FLAG = "hg"
"""How Linux marks memory that should be in huge pages."""


def asks_for_huge_pages(place: int) -> bool:
    """Return whether the memory at an address should be in huge pages.

    The test is skipped if the system has none.
    """
    maps = Path("/proc/self/smaps")
    if not Path("/sys/kernel/mm/transparent_hugepage").exists() or not maps.exists():
        pytest.skip("this system has no huge pages")
    inside = False
    for line in maps.read_text().splitlines():
        first, _, values = line.partition(" ")
        if "-" in first:
            start, stop = (int(edge, 16) for edge in first.split("-"))
            inside = start <= place < stop
        elif first == "VmFlags:" and inside:
            return _FLAG in values.split()
    return False
