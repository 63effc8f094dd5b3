"""Outstanding dependencies, tracked as instructions complete one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.lazy import cached_property
from tpcompile.vm.proof.dependencies import Group

Groups = Sequence[tuple[Group, ...]]
"""For each instruction, the groups that must complete before it starts."""


class Uses(list[tuple[Group, ...]]):
    """`Groups` with cached tables: the users of each group, and the groups of each member.

    It must not be changed after a table was used.
    """

    @staticmethod
    def of(groups: Groups) -> Uses:
        return groups if isinstance(groups, Uses) else Uses(groups)

    @cached_property
    def users(self) -> dict[Group, list[int]]:
        """For each group, the instructions that wait for it."""
        users: dict[Group, list[int]] = {}
        for number, groups in enumerate(self):
            for group in groups:
                if group in users:
                    users[group].append(number)
                else:
                    users[group] = [number]
        return users

    @cached_property
    def inside(self) -> list[list[Group]]:
        """For each instruction, the groups that it is a member of."""
        groups: list[list[Group]] = [[] for _ in self]
        for group in self.users:
            for early in group.members:
                groups[early].append(group)
        return groups


class Waiting:
    """The outstanding dependencies of each instruction."""

    def __init__(self, groups: Groups) -> None:
        uses = Uses.of(groups)
        self.left = list(map(len, uses))
        """By instruction, the number of groups that it still waits for."""
        self._users = uses.users
        self._missing = {group: len(group.members) for group in uses.users}
        self.inside = uses.inside

    def released_by(self, number: int) -> list[int]:
        """Mark `number` as complete, and return the instructions that become ready."""
        left, missing = self.left, self._missing
        ready: list[int] = []
        for group in self.inside[number]:
            missing[group] -= 1
            if not missing[group]:
                for user in self._users[group]:
                    left[user] -= 1
                    if not left[user]:
                        ready.append(user)
        return ready
