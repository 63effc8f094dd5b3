"""The loop that measures the read bandwidth."""

from __future__ import annotations

import pytest

from benchmarks.bandwidth import ReadLoop


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_the_read_loop(threads: int | None) -> None:
    loop = ReadLoop(1_000_001)
    assert loop.size >= 1_000_001
    assert 1e6 < loop.bandwidth(threads) < 1e13
    assert 1e5 < loop.bandwidth(threads, 100_000) < 1e13
