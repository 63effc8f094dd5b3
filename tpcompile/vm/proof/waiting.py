"""Outstanding dependencies, tracked as instructions complete one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tpcompile.vm.proof.dependencies import Group

Groups = Sequence[tuple[Group, ...]]
"""For each instruction, the groups that must complete before it starts."""


class Waiting:
    """The outstanding dependencies of each instruction."""

    def __init__(self, groups: Groups) -> None:
        self.left = [len(own) for own in groups]
        """By instruction, the number of groups that it still waits for."""
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
        """Mark `number` as complete, and yield the instructions that become ready."""
        left, missing = self.left, self._missing
        for group in self.inside[number]:
            missing[group] -= 1
            if not missing[group]:
                for user in self._users[group]:
                    left[user] -= 1
                    if not left[user]:
                        yield user


def inside(groups: Iterable[Group], count: int) -> list[list[Group]]:
    """Return, for each instruction, the groups that it is a member of."""
    found: list[list[Group]] = [[] for _ in range(count)]
    for group in groups:
        for early in group.members:
            found[early].append(group)
    return found
