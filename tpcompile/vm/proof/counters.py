"""Counters for the dependencies that queue order does not already enforce.

A counter belongs to a group of instructions that are waited for together. Each member signals it
once, and a wait is always for all members, so the order of the signals does not matter. A wait is
omitted if the queue and earlier waits imply it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpcompile.errors import VerifyError
from tpcompile.vm.program import Wait, queue_by_instruction
from tpcompile.vm.proof.dependencies import Group
from tpcompile.vm.proof.known import NOTHING, Known, Several, missing, several, union, with_one
from tpcompile.vm.proof.waiting import Groups, Waiting

Queues = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Ordering:
    """The waits and signals of each instruction."""

    waits: tuple[tuple[Wait, ...], ...]
    signals: tuple[tuple[int, ...], ...]


def assign_counters(
    groups: Groups, queues: Queues, sharing: int = 1, repeats: bool = False
) -> Ordering:
    """Return waits and signals for instructions with these dependencies, run in these queues.

    If the program `repeats`, no step starts before the previous one is complete.
    """
    waited = _gathered(_thinned(groups, queues, sharing))
    ordering = _numbered(waited)
    return _between_steps(groups, queues, sharing, ordering) if repeats else ordering


def _numbered(waited: Groups) -> Ordering:
    """Give each group a counter, numbered in the order in which groups are first waited for."""
    numbers: dict[Group, int] = {}
    waits: list[tuple[Wait, ...]] = []
    for groups in waited:
        waits.append(
            tuple(Wait(numbers.setdefault(g, len(numbers)), len(g.members)) for g in groups)
        )
    signals: list[list[int]] = [[] for _ in waited]
    for group, counter in numbers.items():
        for number in group.members:
            signals[number].append(counter)
    return Ordering(tuple(waits), tuple(map(tuple, signals)))


def _thinned(groups: Groups, queues: Queues, sharing: int) -> list[tuple[Group, ...]]:
    """Return the groups that each instruction waits for, without those known to be complete."""
    waiting = Waiting(groups)
    queue_of = queue_by_instruction(queues)
    front: list[Known] = [NOTHING] * len(queues)
    behind: dict[Group, Known] = {}
    """By group, the instructions known to be complete once the group is."""
    members: dict[Group, Several] = {}
    waited: list[tuple[Group, ...]] = [()] * len(groups)
    for number in _in_some_order(waiting, queues, queue_of):
        queue = queue_of[number]
        before = known = front[queue] if sharing == 1 else NOTHING
        predecessors, mandatory = groups[number], []
        if len(predecessors) > 1:  # groups with later members imply more
            predecessors = tuple(sorted(predecessors, key=_latest, reverse=True))
        for group in predecessors:
            if group.members[-1] < known[0]:
                continue
            if group not in members:
                members[group] = several(group.members)
            if missing(members[group], known) is not None:
                known = union(known, behind[group])
                mandatory.append(group)
        if len(mandatory) > 1:  # a later group may imply an earlier one
            mandatory = _without_implied(mandatory, before, members, behind)
        waited[number] = tuple(mandatory)
        done = front[queue] = with_one(known, number)
        for group in waiting.inside[number]:
            earlier = behind.get(group)
            behind[group] = done if earlier is None else union(earlier, done)
    return waited


def _without_implied(
    groups: list[Group],
    before: Known,
    members: Mapping[Group, Several],
    behind: Mapping[Group, Known],
) -> list[Group]:
    """Return the groups that the others, together with `before`, do not imply."""
    after = [before]
    """At place k: the instructions known to be complete after `before` and the last k groups."""
    for group in reversed(groups[1:]):
        after.append(union(after[-1], behind[group]))
    mandatory: list[Group] = []
    first = NOTHING
    for group in groups:
        if missing(members[group], union(first, after.pop())) is not None:
            mandatory.append(group)
            first = union(first, behind[group])
    return mandatory


def _latest(group: Group) -> int:
    return group.members[-1]


def _in_some_order(waiting: Waiting, queues: Queues, queue_of: dict[int, int]) -> Iterator[int]:
    """Yield the instructions in an order that both the queues and the dependencies allow."""
    place = [0] * len(queues)
    awake = list(range(len(queues)))
    while awake:
        index = awake.pop()
        queue = queues[index]
        while place[index] < len(queue) and not waiting.left[queue[place[index]]]:
            number = queue[place[index]]
            yield number
            place[index] += 1
            for user in waiting.released_by(number):
                other = queue_of[user]
                if other != index and queues[other][place[other]] == user:
                    awake.append(other)
    stuck = sum(map(len, queues)) - sum(place)
    if stuck:
        raise VerifyError(
            "The order of the queues contradicts the dependencies",
            got=f"{stuck} instructions that can never run, because the first of them in each "
            "queue waits for instructions further back",
            expected="queues in an order that the dependencies allow",
        )


def _gathered(waited: Sequence[tuple[Group, ...]]) -> list[tuple[Group, ...]]:
    """Merge groups that exactly the same instructions wait for."""
    users: dict[Group, list[int]] = {}
    for number, waited_groups in enumerate(waited):
        for group in waited_groups:
            users.setdefault(group, []).append(number)
    groups_by_waiters: dict[tuple[int, ...], list[Group]] = {}
    for group, waiters in users.items():
        groups_by_waiters.setdefault(tuple(waiters), []).append(group)
    gathered: list[list[Group]] = [[] for _ in waited]
    for together, groups in groups_by_waiters.items():
        merged = groups[0]
        if len(groups) > 1:
            merged = Group(tuple(sorted({n for group in groups for n in group.members})))
        for number in together:
            gathered[number].append(merged)
    return list(map(tuple, gathered))


def _between_steps(groups: Groups, queues: Queues, sharing: int, ordering: Ordering) -> Ordering:
    """Make instructions with no predecessor wait for those with no successor in the previous step.

    If each queue has one worker, each instruction in a queue precedes the later ones, and the last
    one precedes the worker's next step.
    """
    ends = set(range(len(groups)))
    for group in {group for predecessors in groups for group in predecessors}:
        ends.difference_update(group.members)
    begins = {number for number, predecessors in enumerate(groups) if not predecessors}
    if sharing == 1:
        ends -= {number for queue in queues for number in queue[:-1]}
        begins -= {number for queue in queues for number in queue[1:]}
        for queue in queues:
            if ends == set(queue[-1:]):
                begins -= set(queue)
    if not begins:
        return ordering
    counter = 1 + max((c for counters in ordering.signals for c in counters), default=-1)
    waits, signals = list(ordering.waits), list(ordering.signals)
    for number in begins:
        waits[number] = (Wait(counter, 0), *waits[number])
    for number in ends:
        signals[number] = (*signals[number], counter)
    return Ordering(tuple(waits), tuple(signals))
