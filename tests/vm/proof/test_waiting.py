"""Instructions become ready when all groups that they wait for are complete."""

from __future__ import annotations

from tpcompile.vm.proof.dependencies import Group
from tpcompile.vm.proof.waiting import Uses, Waiting


def test_a_group_is_done_when_all_its_members_are() -> None:
    pair, last = Group((0, 1)), Group((1,))
    waiting = Waiting([(), (), (pair,), (pair, last)])
    assert waiting.left == [0, 0, 1, 2]
    assert waiting.inside == [[pair], [pair, last], [], []]
    assert list(waiting.released_by(0)) == []
    assert list(waiting.released_by(1)) == [2, 3]


def test_tables_are_made_once() -> None:
    group = Group((0,))
    uses = Uses([(), (group,), (group,)])
    assert Uses.of(uses) is uses and Uses.of(list(uses)) == uses
    assert uses.users == {group: [1, 2]}
    first, second = Waiting(uses), Waiting(uses)
    assert first.released_by(0) == [1, 2]
    assert second.left == [0, 1, 1] and second.inside is first.inside
