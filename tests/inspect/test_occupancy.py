"""Tests of the occupancy strip: the number of busy workers per kind."""

from __future__ import annotations

import pytest

from tests.inspect.schedules import step_timeline
from tpcompile.inspect.occupancy import busy_shares


def test_the_overview_shows_how_many_are_busy() -> None:
    timeline = step_timeline(5, 4)
    kinds = list(dict.fromkeys(instruction.name for instruction in timeline.program.instructions))
    shares = busy_shares(timeline, range(4), kinds)
    assert list(shares) == kinds
    for parts in zip(*shares.values(), strict=True):
        assert 0 <= sum(parts) <= 1 + 1e-9
    for kind, share in shares.items():
        took = sum(
            timeline.timing.finishes[n] - timeline.timing.starts[n]
            for n, i in enumerate(timeline.program.instructions)
            if i.name == kind
        )
        assert sum(share) / len(share) == pytest.approx(took / timeline.timing.makespan / 4)
