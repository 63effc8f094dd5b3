"""Policies: who runs what, and in which order. A table, from a policy's name to its queues."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpcompile.errors import UsageError, did_you_mean
from tpcompile.vm.proof.waiting import Groups
from tpcompile.vm.schedule.list_schedule import Start, list_schedule

Queues = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Work:
    """What there is to do: instructions by number, and as many workers on every rank."""

    groups: Groups
    """What must be done before each."""
    costs: Sequence[float]
    ranks_of: Sequence[int]
    """The rank of each."""
    workers: int
    ranks: int

    def by_rank(self) -> list[list[int]]:
        """The instructions of each rank, in program order."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for number, rank in enumerate(self.ranks_of):
            found[rank].append(number)
        return found

    def starts(self) -> list[Start]:
        """Who starts what, in order, under list scheduling."""
        return list_schedule(self.groups, self.costs, self.ranks_of, self.workers, self.ranks)


class Policy(NamedTuple):
    """How queues are made."""

    queues: Callable[[Work], Queues]
    """Those of all workers, rank after rank; of a dynamic one, one for each rank."""
    dynamic: bool = False
    """Whether all workers of a rank take from one queue."""


def schedule(
    policy: str,
    groups: Groups,
    costs: Sequence[float],
    workers: int,
    ranks_of: Sequence[int] | None = None,
    ranks: int = 1,
) -> Queues:
    """The queues of `workers` on each rank for instructions with these dependencies and costs."""
    if workers < 1:
        raise UsageError(f"{workers} workers can run nothing", expected="1 worker or more")
    chosen = policy_of(policy)
    if ranks_of is None:
        ranks_of = [0] * len(groups)
    return chosen.queues(Work(groups, costs, ranks_of, workers, ranks))


def policy_of(name: str) -> Policy:
    if name not in POLICIES:
        raise UsageError(f"There is no policy {name!r}", hint=did_you_mean(name, POLICIES))
    return POLICIES[name]


def _round_robin(work: Work) -> Queues:
    """Dealt out in program order."""
    return tuple(
        tuple(own[worker :: work.workers])
        for own in work.by_rank()
        for worker in range(work.workers)
    )


def _zigzag(work: Work) -> Queues:
    """Dealt out to and fro, so that the last workers of a lap are the first of the next."""
    found: list[list[int]] = []
    for own in work.by_rank():
        queues: list[list[int]] = [[] for _ in range(work.workers)]
        for number, instruction in enumerate(own):
            lap, place = divmod(number, work.workers)
            queues[place if lap % 2 == 0 else work.workers - 1 - place].append(instruction)
        found += queues
    return tuple(map(tuple, found))


def _wave(work: Work) -> Queues:
    """Wave after wave of what can run at once, the longest first, each to whom has least to do."""
    waves: dict[tuple[int, int], list[int]] = {}
    for number, depth in enumerate(depths(work.groups)):
        waves.setdefault((depth, work.ranks_of[number]), []).append(number)
    queues: list[list[int]] = [[] for _ in range(work.ranks * work.workers)]
    for depth, rank in sorted(waves):
        first = rank * work.workers
        free = [(0.0, place) for place in range(first, first + work.workers)]
        for number in sorted(waves[depth, rank], key=lambda n: (-work.costs[n], n)):
            busy, place = heapq.heappop(free)
            queues[place].append(number)
            heapq.heappush(free, (busy + work.costs[number], place))
    return tuple(map(tuple, queues))


def _critical_path(work: Work) -> Queues:
    """As list scheduling starts them."""
    queues: list[list[int]] = [[] for _ in range(work.ranks * work.workers)]
    for start in work.starts():
        queues[start.place].append(start.number)
    return tuple(map(tuple, queues))


def _dynamic(work: Work) -> Queues:
    """For each rank all that it has to do, in the order in which list scheduling starts it."""
    queues: list[list[int]] = [[] for _ in range(work.ranks)]
    for start in work.starts():
        queues[start.place // work.workers].append(start.number)
    return tuple(map(tuple, queues))


def depths(groups: Groups) -> list[int]:
    """How many instructions must come one after the other before each."""
    deepest: dict[object, int] = {}
    found: list[int] = []
    for own in groups:
        for group in own:
            if group not in deepest:
                deepest[group] = 1 + max(found[early] for early in group.members)
        found.append(max((deepest[group] for group in own), default=0))
    return found


POLICIES: dict[str, Policy] = {
    "round-robin": Policy(_round_robin),
    "zigzag": Policy(_zigzag),
    "wave": Policy(_wave),
    "critical-path": Policy(_critical_path),
    "dynamic": Policy(_dynamic, dynamic=True),
}
