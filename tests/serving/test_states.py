"""Tests of states: those of sequences, and snapshots in the order in which they are lost."""

from __future__ import annotations

from typing import Any

import pytest

from tpcompile.errors import UsageError
from tpcompile.serving.plan import Limits, Sequence
from tpcompile.serving.scheduler import Scheduler
from tpcompile.serving.states import States
from tpcompile.serving.stock import Content

WIDE: dict[str, Any] = {"blocks": 40, "block": 2, "sequences": 2, "step_tokens": 64, "chunk": 4}


def sequence(number: int) -> Sequence:
    return Sequence((number, number), [1] * 16)


def content(number: int) -> Content:
    return Content(number, None, (number, number), None)


def computed(scheduler: Scheduler, tokens: list[int], salt: str | None = None) -> Sequence:
    """Compute a prompt to its end; return its sequence, which has ended."""
    added = scheduler.add(tokens, salt)
    while added.left:
        scheduler.done(scheduler.plan().pieces)
    scheduler.end(added)
    return added


def test_a_sequence_reads_the_state_that_it_has_written() -> None:
    states, user = States(4), sequence(0)
    states.begin(user, [])
    assert user.state is None and states.held == 1
    written = user.next_state
    states.advance(user)
    assert user.state == written != user.next_state and states.held == 2
    states.end(user)
    assert (user.state, user.next_state, states.available) == (None, None, 4)


def test_a_fork_shares_the_state_and_writes_its_own() -> None:
    states, parent, child = States(4), sequence(0), sequence(1)
    states.begin(parent, [])
    states.advance(parent)
    states.fork(parent, child)
    assert child.state == parent.state and child.next_state != parent.next_state
    shared = parent.state
    assert shared is not None and states.holders(shared) == 2
    states.advance(parent)
    assert states.holders(shared) == 1 and child.state == shared


def kept(states: States, *numbers: int) -> list[Content]:
    """Take a snapshot after each of these contents; return the contents."""
    contents = []
    for number in numbers:
        user, snapshot = sequence(number), content(number)
        states.begin(user, [])
        states.advance(user)
        states.keep(user, snapshot)
        states.end(user)
        contents.append(snapshot)
    return contents


def test_the_least_recently_used_snapshot_is_lost() -> None:
    states, user = States(4), sequence(9)
    first, second, third = kept(states, 1, 2, 3)
    assert states.kept == 3
    states.begin(user, [first])  # takes the last free state to write
    states.advance(user)
    assert states.resumable([first, second]) == [first], "the second one was used longest ago"
    assert states.resumable([third, second]) == [third]
    states.advance(user)
    assert states.resumable([third]) == [third] and states.resumable([first]) == [first]


def test_a_snapshot_in_use_is_not_lost() -> None:
    states, users = States(5), [sequence(7), sequence(8)]
    (first,) = kept(states, 1)
    for user in users:
        states.begin(user, [first])
    (second,) = kept(states, 2)
    states.end(users[1])
    kept(states, 3, 4)
    assert users[0].state is not None
    assert states.resumable([first]) == [first] and states.resumable([second]) == []


def test_a_snapshot_goes_with_its_block() -> None:
    states = States(4)
    first, second = kept(states, 1, 2)
    states.drop(first)
    states.drop(content(5))
    assert states.resumable([first]) == [] and states.resumable([first, second]) == [first, second]
    assert (states.kept, states.available) == (1, 4)


def test_a_state_that_a_sequence_still_has_is_not_taken_with_its_block() -> None:
    states, user = States(4), sequence(0)
    states.begin(user, [])
    states.advance(user)
    snapshot = content(1)
    states.keep(user, snapshot)
    states.drop(snapshot)
    assert states.held == 2 and states.kept == 0
    states.end(user)
    assert states.available == 4


@pytest.mark.parametrize(
    ("known", "shared"),
    [(4, 0), (8, 0), (12, 12), (20, 12), (23, 12), (24, 24), (27, 24), (28, 28)],
)
def test_a_prompt_goes_on_where_a_snapshot_is(known: int, shared: int) -> None:
    """Snapshots are at the last end of a chunk, and every so many chunks."""
    scheduler = Scheduler(Limits(**WIDE, states=12, snapshot_chunks=3))
    computed(scheduler, list(range(30)))
    assert computed(scheduler, [*range(known), 99, 99]).shared == shared


def test_where_a_prompt_parts_with_another_one_there_is_a_snapshot() -> None:
    scheduler = Scheduler(Limits(**WIDE, states=12))
    computed(scheduler, list(range(31)))
    assert [computed(scheduler, [*range(15), n, n, n]).shared for n in (90, 91)] == [0, 12]


def test_a_prompt_of_whole_chunks() -> None:
    """The same prompt goes on before its last chunk, and a longer one after it."""
    scheduler = Scheduler(Limits(**WIDE, states=12))
    computed(scheduler, list(range(16)))
    assert computed(scheduler, list(range(16))).shared == 12
    assert computed(scheduler, list(range(17))).shared == 16


def test_without_a_snapshot_a_prompt_is_computed_again() -> None:
    """Its blocks are then those that are known, so that what follows can be shared."""
    scheduler = Scheduler(Limits(**WIDE, states=5))
    computed(scheduler, list(range(13)))
    for number in range(3):
        computed(scheduler, [100 + number] * 9)
    held = scheduler.blocks.kept
    assert computed(scheduler, [*range(12), *range(50, 59)]).shared == 0
    assert scheduler.blocks.kept == held + 4
    assert computed(scheduler, [*range(12), *range(50, 58), 7]).shared == 20


def test_a_snapshot_whose_blocks_are_needed_is_lost() -> None:
    scheduler = Scheduler(Limits(**{**WIDE, "blocks": 8}, states=12))
    computed(scheduler, list(range(9)))
    assert scheduler.states.kept == 1
    computed(scheduler, list(range(20, 36)))  # takes all blocks
    assert scheduler.states.kept == 2, "those after 12 and 16 tokens"


def test_a_salt_separates_tenants() -> None:
    scheduler = Scheduler(Limits(**WIDE, states=12))
    shared = [computed(scheduler, list(range(13)), salt).shared for salt in ("a", "b", "a", None)]
    assert shared == [0, 0, 12, 0]


def test_a_new_start_forgets_all_snapshots() -> None:
    scheduler = Scheduler(Limits(**WIDE, states=12))
    computed(scheduler, list(range(13)))
    running = scheduler.add(list(range(13)))
    scheduler.done(scheduler.plan().pieces)
    scheduler.restart()
    assert (running.state, running.next_state) == (None, None)
    assert (scheduler.states.available, scheduler.states.kept) == (12, 0)
    scheduler.plan()
    assert running.shared == 0


def test_too_few_states_for_the_sequences() -> None:
    with pytest.raises(UsageError, match=r"3 states for 2 sequences.*at least 4 states"):
        Limits(**WIDE, states=3)
