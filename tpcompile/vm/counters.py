"""Counters for the dependencies that the queues do not keep by themselves.

A counter belongs to a group of instructions that are waited for together; each of them raises
it once, and a wait is always for all of them, so it never depends on which came first. A wait is
left out where the worker has waited for the same before, or for something that did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpcompile.errors import VerifyError
from tpcompile.vm.dependencies import Group
from tpcompile.vm.program import Wait, worker_by_instruction


@dataclass(frozen=True)
class Ordering:
    """The waits and signals of each instruction."""

    waits: tuple[tuple[Wait, ...], ...]
    signals: tuple[tuple[int, ...], ...]


def assign_counters(
    groups: Sequence[tuple[Group, ...]], queues: Sequence[Sequence[int]]
) -> Ordering:
    """Waits and signals for instructions with these dependencies, run in these queues."""
    waited = _thinned(groups, queues)
    numbers: dict[Group, int] = {}
    waits: list[tuple[Wait, ...]] = []
    for own in waited:
        waits.append(tuple(Wait(numbers.setdefault(g, len(numbers)), len(g)) for g in own))
    signals: list[list[int]] = [[] for _ in groups]
    for group, counter in numbers.items():
        for number in group:
            signals[number].append(counter)
    return Ordering(tuple(waits), tuple(map(tuple, signals)))


def _thinned(
    groups: Sequence[tuple[Group, ...]], queues: Sequence[Sequence[int]]
) -> list[list[Group]]:
    """The groups that each instruction must wait for, those left out that are known to be done.

    A set of instructions is an integer, a bit for each.
    """
    worker_of = worker_by_instruction(queues)
    front = [0] * len(queues)
    done = [0] * len(groups)
    """Behind each instruction: what is done then, itself too."""
    behind: dict[Group, int] = {}
    masks: dict[Group, int] = {}
    waited: list[list[Group]] = [[] for _ in groups]
    for number in _in_some_order(groups, queues):
        known = front[worker_of[number]]
        for group in sorted(groups[number], key=max, reverse=True):  # the latest imply the most
            if group not in masks:
                masks[group] = sum(1 << early for early in group)
            if not masks[group] & ~known:
                continue
            if group not in behind:
                behind[group] = _union(done[early] for early in group)
            known |= behind[group]
            waited[number].append(group)
        done[number] = front[worker_of[number]] = known | 1 << number
    return waited


def _union(sets: Iterator[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


def _in_some_order(
    groups: Sequence[tuple[Group, ...]], queues: Sequence[Sequence[int]]
) -> Iterator[int]:
    """An order that both the queues and the dependencies allow."""
    done = [False] * len(groups)
    complete: set[Group] = set()
    place = [0] * len(queues)
    left = len(groups)
    while left:
        before = left
        for worker, queue in enumerate(queues):
            while place[worker] < len(queue):
                number = queue[place[worker]]
                waiting = [group for group in groups[number] if group not in complete]
                if not all(done[early] for group in waiting for early in group):
                    break
                complete.update(waiting)
                yield number
                done[number] = True
                place[worker] += 1
                left -= 1
        if left == before:
            raise VerifyError(
                "The queues contradict the dependencies",
                got=f"{left} instructions that wait for others behind them",
                expected="queues in an order that the dependencies allow",
            )
