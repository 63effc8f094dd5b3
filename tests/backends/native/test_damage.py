"""Damaged programs and tables: refused, or computed as the reference machine does. No crash.

They run in a process of its own, so that a crash is a failure that names its case.
"""

from __future__ import annotations

import re

import pytest

from tests import scripts
from tests.backends.native.damage import CASES, KINDS, REFUSED, SAME


def _run(first: int, count: int, timeout: float) -> dict[str, int]:
    command = ["-m", "tests.backends.native.damage", str(first), str(count)]
    done = scripts.run(command, timeout=timeout)
    lines = done.stdout.splitlines()
    wrong = [line for line in lines[:-1] if not line.endswith((REFUSED, SAME))]
    assert done.returncode == 0, "\n".join([*wrong, *lines[-1:], done.stderr[-2000:]])
    return {name: int(number) for name, number in re.findall(r"'(\w+)': (\d+)", lines[-1])}


def _check(counts: dict[str, int], count: int) -> None:
    assert set(counts) == {REFUSED, SAME} and sum(counts.values()) == count
    assert min(counts.values()) >= count // 20, "both happen"


def test_damage_is_refused_or_does_no_harm() -> None:
    count = len(CASES) * len(KINDS)
    _check(_run(0, count, 300), count)


@pytest.mark.slow
def test_two_thousand() -> None:
    _check(_run(10_000, 2000, 3000), 2000)
