"""Policies: who runs what, and in which order. A table, from a policy's name to its queues."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from tpcompile.errors import UsageError, did_you_mean
from tpcompile.vm.dependencies import Group

Groups = Sequence[tuple[Group, ...]]
Queues = tuple[tuple[int, ...], ...]


def schedule(policy: str, groups: Groups, costs: Sequence[float], workers: int) -> Queues:
    """The queues of `workers` for instructions with these dependencies, which take so long."""
    if workers < 1:
        raise UsageError(f"{workers} workers can run nothing", expected="1 worker or more")
    if policy not in POLICIES:
        raise UsageError(f"There is no policy {policy!r}", hint=did_you_mean(policy, POLICIES))
    return POLICIES[policy](groups, costs, workers)


def _round_robin(groups: Groups, costs: Sequence[float], workers: int) -> Queues:
    """Dealt out in program order."""
    return tuple(tuple(range(worker, len(groups), workers)) for worker in range(workers))


def _zigzag(groups: Groups, costs: Sequence[float], workers: int) -> Queues:
    """Dealt out to and fro, so that the last workers of a lap are the first of the next."""
    queues: list[list[int]] = [[] for _ in range(workers)]
    for number in range(len(groups)):
        lap, place = divmod(number, workers)
        queues[place if lap % 2 == 0 else workers - 1 - place].append(number)
    return tuple(map(tuple, queues))


def _wave(groups: Groups, costs: Sequence[float], workers: int) -> Queues:
    """Wave after wave of what can run at once, the longest first, each to whom has least to do."""
    waves: dict[int, list[int]] = {}
    for number, depth in enumerate(depths(groups)):
        waves.setdefault(depth, []).append(number)
    queues: list[list[int]] = [[] for _ in range(workers)]
    for depth in sorted(waves):
        free = [(0.0, worker) for worker in range(workers)]
        for number in sorted(waves[depth], key=lambda n: (-costs[n], n)):
            busy, worker = heapq.heappop(free)
            queues[worker].append(number)
            heapq.heappush(free, (busy + costs[number], worker))
    return tuple(map(tuple, queues))


def _critical_path(groups: Groups, costs: Sequence[float], workers: int) -> Queues:
    """List scheduling: of what is ready, first what most still hangs on, to the first who is free.

    Ready is what has all its inputs by then, not merely given out: workers stand idle until
    something finishes.
    """
    urgency = tails(groups, costs)
    left, users = _inputs(groups)
    ready = [(-urgency[n], n) for n, count in enumerate(left) if not count]
    heapq.heapify(ready)
    idle = list(range(workers))
    running: list[tuple[float, int, int]] = []
    queues: list[list[int]] = [[] for _ in range(workers)]
    now = 0.0
    while ready or running:
        while ready and idle:
            _, number = heapq.heappop(ready)
            worker = heapq.heappop(idle)
            queues[worker].append(number)
            heapq.heappush(running, (now + costs[number], worker, number))
        now, worker, number = heapq.heappop(running)
        heapq.heappush(idle, worker)
        for group in users.get(number, ()):
            group.missing -= 1
            if group.missing:
                continue
            for user in group.users:
                left[user] -= 1
                if not left[user]:
                    heapq.heappush(ready, (-urgency[user], user))
    return tuple(map(tuple, queues))


class _Waiting:
    """A group that is not done, and who waits for it."""

    def __init__(self, group: Group) -> None:
        self.missing = len(group)
        self.users: list[int] = []


def _inputs(groups: Groups) -> tuple[list[int], dict[int, list[_Waiting]]]:
    """How many groups each instruction waits for, and by instruction the groups it is in."""
    waiting: dict[Group, _Waiting] = {}
    inside: dict[int, list[_Waiting]] = {}
    for number, own in enumerate(groups):
        for group in own:
            if group not in waiting:
                waiting[group] = _Waiting(group)
                for early in group:
                    inside.setdefault(early, []).append(waiting[group])
            waiting[group].users.append(number)
    return [len(own) for own in groups], inside


def depths(groups: Groups) -> list[int]:
    """How many instructions must come one after the other before each."""
    deepest: dict[Group, int] = {}
    found: list[int] = []
    for own in groups:
        for group in own:
            if group not in deepest:
                deepest[group] = 1 + max(found[early] for early in group)
        found.append(max((deepest[group] for group in own), default=0))
    return found


def tails(groups: Groups, costs: Sequence[float]) -> list[float]:
    """The time from the start of each instruction to the end, if no worker were ever missing."""
    found = [0.0] * len(groups)
    behind: dict[Group, float] = {}
    own_groups: dict[int, list[Group]] = {}
    for group in {group for own in groups for group in own}:
        behind[group] = 0.0
        for early in group:
            own_groups.setdefault(early, []).append(group)
    for number in reversed(range(len(groups))):
        rest = max((behind[group] for group in own_groups.get(number, ())), default=0.0)
        found[number] = costs[number] + rest
        for group in groups[number]:
            behind[group] = max(behind[group], found[number])
    return found


POLICIES: dict[str, Callable[[Groups, Sequence[float], int], Queues]] = {
    "round-robin": _round_robin,
    "zigzag": _zigzag,
    "wave": _wave,
    "critical-path": _critical_path,
}
