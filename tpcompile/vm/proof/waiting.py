"""Who waits for whom, followed as instructions are done one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tpcompile.vm.proof.dependencies import Group

Groups = Sequence[tuple[Group, ...]]
"""For each instruction the groups that must be done before it."""


class Waiting:
    """What each instruction still waits for."""

    def __init__(self, groups: Groups) -> None:
        self.left = [len(own) for own in groups]
        """How many groups each instruction waits for."""
        self._users: dict[Group, list[int]] = {}
        for number, own in enumerate(groups):
            for group in own:
                if group in self._users:
                    self._users[group].append(number)
                else:
                    self._users[group] = [number]
        self._missing = {group: len(group.members) for group in self._users}
        self.inside = inside(self._users, len(groups))

    def released_by(self, number: int) -> Iterator[int]:
        """Those that have nothing left to wait for, once `number` is done."""
        left, missing = self.left, self._missing
        for group in self.inside[number]:
            missing[group] -= 1
            if not missing[group]:
                for user in self._users[group]:
                    left[user] -= 1
                    if not left[user]:
                        yield user


def inside(groups: Iterable[Group], count: int) -> list[list[Group]]:
    """For each instruction the groups that it is in."""
    found: list[list[Group]] = [[] for _ in range(count)]
    for group in groups:
        for early in group.members:
            found[early].append(group)
    return found
