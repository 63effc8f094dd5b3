"""List scheduling: a free worker takes the ready instruction with the longest remaining path.

An instruction is ready when the instructions it depends on have finished. It is not enough that
they have been assigned to workers: a worker without a ready instruction is idle until one finishes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from tpcompile.vm.proof.dependencies import Group
from tpcompile.vm.proof.waiting import Groups, Uses, Waiting


class Start(NamedTuple):
    """The start of instruction `number` by worker `place`, counted across all ranks."""

    place: int
    number: int


def list_schedule(
    groups: Groups, costs: Sequence[float], ranks_of: Sequence[int], workers: int, ranks: int
) -> list[Start]:
    """Return all starts in order of time; every rank has `workers` workers."""
    waiting = Waiting(groups)
    urgency = _tails(groups, costs, waiting.inside)
    ready: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]
    idle = [list(range(rank * workers, (rank + 1) * workers)) for rank in range(ranks)]
    running: list[tuple[float, int, int]] = []
    starts: list[Start] = []
    now = 0.0
    fresh = [number for number, left in enumerate(waiting.left) if not left]
    changed = set(range(ranks))
    while len(starts) < len(groups):
        for number in fresh:
            heapq.heappush(ready[ranks_of[number]], (-urgency[number], number))
            changed.add(ranks_of[number])
        for rank in changed:
            can, free = ready[rank], idle[rank]
            while can and free:
                _, number = heapq.heappop(can)
                place = heapq.heappop(free)
                starts.append(Start(place, number))
                heapq.heappush(running, (now + costs[number], place, number))
        now = running[0][0]
        fresh, changed = [], set()
        while running and running[0][0] == now:
            _, place, number = heapq.heappop(running)
            heapq.heappush(idle[place // workers], place)
            changed.add(place // workers)
            fresh += waiting.released_by(number)
    return starts


def tails(groups: Groups, costs: Sequence[float]) -> list[float]:
    """Return the time from each instruction's start to the end, with unlimited workers."""
    return _tails(groups, costs, Uses.of(groups).inside)


def _tails(groups: Groups, costs: Sequence[float], inside: list[list[Group]]) -> list[float]:
    behind: dict[Group, float] = {}
    times = [0.0] * len(groups)
    for number in reversed(range(len(groups))):
        longest = 0.0
        for group in inside[number]:
            longest = max(longest, behind[group])
        tail = times[number] = costs[number] + longest
        for group in groups[number]:
            if behind.get(group, 0.0) <= tail:
                behind[group] = tail
    return times
