"""List scheduling: of what is ready, first what most still hangs on, to the first who is free.

Ready is what has all its inputs by then, not merely given out: workers stand idle until
something finishes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from tpcompile.vm.proof.dependencies import Group
from tpcompile.vm.proof.waiting import Groups, Waiting, inside


class Start(NamedTuple):
    """A worker, counted over all ranks, starts an instruction."""

    place: int
    number: int


def list_schedule(
    groups: Groups, costs: Sequence[float], ranks_of: Sequence[int], workers: int, ranks: int
) -> list[Start]:
    """Who starts what, in the order of time; every rank has so many workers."""
    waiting = Waiting(groups)
    urgency = _tails(groups, costs, waiting.inside)
    ready: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]
    idle = [list(range(rank * workers, (rank + 1) * workers)) for rank in range(ranks)]
    running: list[tuple[float, int, int]] = []
    found: list[Start] = []
    now = 0.0
    fresh = [number for number, left in enumerate(waiting.left) if not left]
    changed = set(range(ranks))
    while len(found) < len(groups):
        for number in fresh:
            heapq.heappush(ready[ranks_of[number]], (-urgency[number], number))
            changed.add(ranks_of[number])
        for rank in changed:
            can, free = ready[rank], idle[rank]
            while can and free:
                _, number = heapq.heappop(can)
                place = heapq.heappop(free)
                found.append(Start(place, number))
                heapq.heappush(running, (now + costs[number], place, number))
        now = running[0][0]
        fresh, changed = [], set()
        while running and running[0][0] == now:
            _, place, number = heapq.heappop(running)
            heapq.heappush(idle[place // workers], place)
            changed.add(place // workers)
            fresh += waiting.released_by(number)
    return found


def tails(groups: Groups, costs: Sequence[float]) -> list[float]:
    """The time from the start of each instruction to the end, if no worker were ever missing."""
    used = dict.fromkeys(group for own in groups for group in own)
    return _tails(groups, costs, inside(used, len(groups)))


def _tails(groups: Groups, costs: Sequence[float], inside: list[list[Group]]) -> list[float]:
    behind: dict[Group, float] = {}
    found = [0.0] * len(groups)
    for number in reversed(range(len(groups))):
        rest = 0.0
        for group in inside[number]:
            rest = max(rest, behind[group])
        tail = found[number] = costs[number] + rest
        for group in groups[number]:
            if behind.get(group, 0.0) <= tail:
                behind[group] = tail
    return found
