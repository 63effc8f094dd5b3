"""Scheduling policies: which worker runs each instruction, and in which order.

`POLICIES` maps the names of policies to the functions that make their queues.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpcompile.errors import UsageError
from tpcompile.registry import Registry
from tpcompile.vm.proof.waiting import Groups
from tpcompile.vm.schedule.list_schedule import Start, list_schedule
from tpcompile.vm.targets import Target

DEFAULT_POLICY = "critical-path"
"""The default for targets whose workers each have a block of a phase."""
SHARED_POLICY = "dynamic"
"""The default for targets whose workers have several blocks of a phase each."""
Queues = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Work:
    """The instructions to schedule, by number, and the number of workers per rank."""

    groups: Groups
    """For each instruction, the groups that must complete before it starts."""
    costs: Sequence[float]
    ranks_of: Sequence[int]
    """The rank of each instruction."""
    workers: int
    ranks: int

    def by_rank(self) -> list[list[int]]:
        """Return the instructions of each rank, in program order."""
        instructions: list[list[int]] = [[] for _ in range(self.ranks)]
        for number, rank in enumerate(self.ranks_of):
            instructions[rank].append(number)
        return instructions

    def starts(self) -> list[Start]:
        """Return all starts under list scheduling, in order of time."""
        return list_schedule(self.groups, self.costs, self.ranks_of, self.workers, self.ranks)


class Policy(NamedTuple):
    """A way to distribute instructions over queues."""

    queues: Callable[[Work], Queues]
    """Callback that makes the queues: one per worker, rank after rank; one per rank if dynamic."""
    dynamic: bool = False
    """Whether all workers of a rank take from one queue."""


POLICIES: Registry[Policy] = Registry("policy")
MakeQueues = Callable[[Work], Queues]


def policy(name: str, dynamic: bool = False) -> Callable[[MakeQueues], MakeQueues]:
    """Return a decorator that registers the function that makes the queues of a policy."""

    def add(queues: MakeQueues) -> MakeQueues:
        POLICIES.add(name, Policy(queues, dynamic))
        return queues

    return add


def policy_for(target: Target, name: str | None = None) -> str:
    """Return the policy of this name, in any case, or the default policy of a target."""
    if name is None:
        return SHARED_POLICY if target.blocks_per_worker > 1 else DEFAULT_POLICY
    return POLICIES.spelling(name)


def schedule(
    name: str,
    groups: Groups,
    costs: Sequence[float],
    workers: int,
    ranks_of: Sequence[int] | None = None,
    ranks: int = 1,
) -> Queues:
    """Return the queues for instructions with these dependencies and costs.

    Every rank has `workers` workers. Without `ranks_of`, all instructions are on rank 0.
    """
    if workers < 1:
        raise UsageError(f"workers must be at least 1, got {workers}")
    chosen = POLICIES[name]
    if ranks_of is None:
        ranks_of = [0] * len(groups)
    return chosen.queues(Work(groups, costs, ranks_of, workers, ranks))


@policy("round-robin")
def _round_robin(work: Work) -> Queues:
    """Deal the instructions out to the workers in turn, in program order."""
    return tuple(
        tuple(instructions[worker :: work.workers])
        for instructions in work.by_rank()
        for worker in range(work.workers)
    )


@policy("zigzag")
def _zigzag(work: Work) -> Queues:
    """Deal the instructions out back and forth: a lap's last worker is the next lap's first."""
    all_queues: list[list[int]] = []
    for instructions in work.by_rank():
        queues: list[list[int]] = [[] for _ in range(work.workers)]
        for number, instruction in enumerate(instructions):
            lap, place = divmod(number, work.workers)
            queues[place if lap % 2 == 0 else work.workers - 1 - place].append(instruction)
        all_queues += queues
    return tuple(map(tuple, all_queues))


@policy("wave")
def _wave(work: Work) -> Queues:
    """Assign wave after wave of instructions that can run at once.

    In each wave the longest instructions come first, and each instruction goes to the worker with
    the least work in that wave.
    """
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


@policy(DEFAULT_POLICY)
def _critical_path(work: Work) -> Queues:
    """Assign instructions to workers as list scheduling does."""
    queues: list[list[int]] = [[] for _ in range(work.ranks * work.workers)]
    for start in work.starts():
        queues[start.place].append(start.number)
    return tuple(map(tuple, queues))


@policy(SHARED_POLICY, dynamic=True)
def _dynamic(work: Work) -> Queues:
    """Make one queue per rank, in the order in which list scheduling starts instructions."""
    queues: list[list[int]] = [[] for _ in range(work.ranks)]
    for start in work.starts():
        queues[start.place // work.workers].append(start.number)
    return tuple(map(tuple, queues))


def depths(groups: Groups) -> list[int]:
    """Return, for each instruction, the length of the longest chain of instructions before it."""
    deepest: dict[object, int] = {}
    lengths: list[int] = []
    for predecessors in groups:
        for group in predecessors:
            if group not in deepest:
                deepest[group] = 1 + max(lengths[early] for early in group.members)
        lengths.append(max((deepest[group] for group in predecessors), default=0))
    return lengths
