"""The time of the phases of a piece of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def timed(
    seconds: dict[str, float], phase: str, clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """Add the time of the block, by a clock, to that of a phase."""
    started = clock()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + clock() - started
