"""Tests of the scheduler: hypothesis drives it as an engine would, and checks every plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tpcompile.errors import UsageError
from tpcompile.serving.plan import Limits, Piece, Plan, Sequence, groups
from tpcompile.serving.scheduler import Scheduler

TIGHT = Limits(blocks=6, block=2, sequences=3, step_tokens=8, chunk=4)
WIDE = {"blocks": 40, "block": 2, "sequences": 4, "chunk": 4}


class Driven(RuleBasedStateMachine):
    """Requests arrive, run, fork and end in any order. With two tokens, many prefixes are equal."""

    @initialize(
        blocks=st.integers(2, 12),
        sequences=st.integers(1, 5),
        block=st.sampled_from([1, 2, 3]),
        times=st.integers(1, 3),
        more=st.integers(0, 9),
        snapshots=st.none() | st.integers(0, 4),
        apart=st.integers(1, 4),
    )
    def begin(
        self,
        blocks: int,
        sequences: int,
        block: int,
        times: int,
        more: int,
        snapshots: int | None,
        apart: int,
    ) -> None:
        chunk = block * times
        states = 0 if snapshots is None else 2 * sequences + snapshots
        self.limits = Limits(
            blocks, block, sequences, sequences + chunk + more, chunk, states, apart
        )
        self.scheduler = Scheduler(self.limits)
        self.alive: list[Sequence] = []
        self.memory = Memory(self.limits)

    @rule(data=st.data(), salt=st.sampled_from([None, "a"]))
    def add(self, data: st.DataObject, salt: str | None) -> None:
        most = min(24, self.limits.most_tokens)
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=most))
        self.alive.append(self.scheduler.add(tokens, salt))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.alive))
        self.alive.remove(gone)
        self.scheduler.end(gone)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        before = {sequence.order: sequence.computed for sequence in self.alive}
        was_running = self.scheduler.running[:1]
        plan = self.scheduler.plan()
        self.check(plan)
        for pieces in self.memory.run(plan):
            self.scheduler.done(pieces)
            for piece in pieces:
                if piece.last:
                    self.go_on(piece.sequence, data)
        assert plan, "a step must compute something"
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        if oldest is not None and oldest in was_running:
            assert oldest.computed > before[oldest.order], "the oldest sequence must get further"

    @rule(planned=st.booleans())
    def restart(self, planned: bool) -> None:
        """Let the ranks die, possibly in a step, and with them what they have stored."""
        if planned:
            self.scheduler.plan()
        self.scheduler.restart()
        self.memory = Memory(self.limits)

    def teardown(self) -> None:
        """Everybody ends: with a new token each, in at most a few steps for each chunk."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(200):
            plan = self.scheduler.plan()
            for pieces in self.memory.run(plan):
                self.scheduler.done(pieces)
            for sequence in plan.complete:
                self.scheduler.end(sequence)
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.scheduler.blocks.available == self.limits.blocks
        assert self.scheduler.states.available == self.limits.states

    def go_on(self, sequence: Sequence, data: st.DataObject) -> None:
        """Append a token, or end; after a prompt, possibly go on several times."""
        if data.draw(st.integers(0, 5)) == 0:
            child = self.scheduler.fork(sequence)
            self.alive.append(child)
            if child.left == 0:
                self.append_or_end(child, 0)
        token = data.draw(st.integers(0, 1))
        room = len(sequence.tokens) < self.limits.most_tokens
        if room:
            self.append_or_end(sequence, token)
        else:
            self.end(sequence)

    def append_or_end(self, sequence: Sequence, token: int) -> None:
        """Append a token, and end a sequence that has no room for another one."""
        self.scheduler.append(sequence, token)
        if len(sequence.tokens) >= self.limits.most_tokens:
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.alive.remove(sequence)
        self.scheduler.end(sequence)

    def check(self, plan: Plan) -> None:
        """Check what a plan promises."""
        limits, scheduler = self.limits, self.scheduler
        pieces = [*plan.decodes, *plan.chunks]
        assert sum(piece.count for piece in pieces) <= limits.step_tokens
        assert len(scheduler.running) <= limits.sequences
        reached = {sequence.order: sequence.computed for sequence in self.alive}
        for piece in pieces:
            sequence = piece.sequence
            assert sequence in scheduler.running and sequence not in plan.preempted
            assert piece.first == reached[sequence.order]
            reached[sequence.order] += piece.count
            end = piece.first + piece.count
            assert end <= min(len(sequence.blocks) * limits.block, len(sequence.tokens))
            chunks = piece.first // limits.chunk, (end - 1) // limits.chunk
            assert piece.count == 1 or chunks[0] == chunks[1], "pieces end at multiples of a chunk"
            for block in sequence.blocks[piece.first // limits.block :]:
                assert scheduler.blocks.holders(block) == 1, "written blocks are not shared"
            assert (sequence.next_state is None) == (limits.states == 0)
        for source, target in plan.copies:
            assert source != target and scheduler.blocks.holders(target) == 1
        self.check_waiting(plan)

    def check_waiting(self, plan: Plan) -> None:
        """Nobody waits while its next chunk fits."""
        limits, scheduler = self.limits, self.scheduler
        full = len(scheduler.running) == limits.sequences
        if not scheduler.waiting or plan.preempted or full:
            return
        used = sum(piece.count for piece in [*plan.decodes, *plan.chunks])
        if used + limits.chunk > limits.step_tokens:
            return
        head = scheduler.waiting[0]
        known = scheduler.blocks.find(head.tokens[:-1], head.salt)
        whole = len(known) * limits.block // limits.chunk * limits.chunk // limits.block
        shared = len(scheduler.states.resumable(known[:whole])) * limits.block
        shared_blocks = [c.block for c in known[: shared // limits.block]]
        idle = sum(scheduler.blocks.holders(block) == 0 for block in shared_blocks)
        end = min(len(head.tokens), shared + limits.chunk)
        needed = -(-end // limits.block) - len(shared_blocks)
        assert needed > scheduler.blocks.available - idle

    @invariant()
    def no_block_is_lost_or_held_twice(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        blocks = self.scheduler.blocks
        held = [block for sequence in self.scheduler.running for block in sequence.blocks]
        for sequence in self.scheduler.running:
            assert len(set(sequence.blocks)) == len(sequence.blocks)
        for block in range(blocks.count):
            assert blocks.holders(block) == held.count(block)
        assert blocks.available == blocks.count - len(set(held))
        assert all(
            not sequence.blocks and not sequence.computed for sequence in self.scheduler.waiting
        )
        self.check_states()
        assert sorted(sequence.order for sequence in self.alive) == sorted(
            sequence.order for sequence in (*self.scheduler.running, *self.scheduler.waiting)
        )

    def check_states(self) -> None:
        """Check that each sequence that runs has the state that it reads, and one of its own."""
        states = self.scheduler.states
        read = [sequence.state for sequence in self.scheduler.running if sequence.state is not None]
        write = [
            sequence.next_state
            for sequence in self.scheduler.running
            if sequence.next_state is not None
        ]
        assert len(write) == (len(self.scheduler.running) if self.limits.states else 0)
        assert len(set(write)) == len(write) and not set(write) & set(read)
        for state in range(states.count):
            assert states.holders(state) == read.count(state) + write.count(state)
        assert states.held == len({*read, *write}) and states.held + states.kept <= states.count
        for sequence in self.scheduler.running:
            assert (sequence.state is None) == (sequence.computed == 0 or not self.limits.states)
        for sequence in self.scheduler.waiting:
            assert sequence.state is None and sequence.next_state is None


class Memory:
    """What ranks store: for each slot and each state, the tokens and the salt that lead to it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.slots: dict[tuple[int, int], Stored] = {}
        self.states: dict[int, Stored] = {}

    def run(self, plan: Plan) -> Iterator[list[Piece]]:
        """Run a plan as an engine does; yield the pieces of each run."""
        size, has_states = self.limits.block, self.limits.states > 0
        for source, target in plan.copies:
            for slot in range(size):
                if (source, slot) in self.slots:
                    self.slots[target, slot] = self.slots[source, slot]
        for pieces in groups(plan.chunks, lambda piece: piece.count == 1, apart=has_states):
            self.run_pieces(pieces)
            yield pieces
        if plan.decodes:
            self.run_pieces(plan.decodes)
            yield plan.decodes

    def run_pieces(self, pieces: list[Piece]) -> None:
        """Check all that a run reads, as it was before the run, and then write."""
        if self.limits.states:
            for piece in pieces:
                if piece.first:
                    assert piece.sequence.state is not None
                    assert self.states[piece.sequence.state] == stored(piece, piece.first)
            for piece in pieces:
                assert piece.sequence.next_state is not None
                self.states[piece.sequence.next_state] = stored(piece, piece.first + piece.count)
        for piece in pieces:
            for position in range(piece.first + piece.count):
                slot = (
                    piece.sequence.blocks[position // self.limits.block],
                    position % self.limits.block,
                )
                if position < piece.first:
                    assert self.slots[slot] == stored(piece, position + 1)
                else:
                    self.slots[slot] = stored(piece, position + 1)


Stored = tuple[tuple[int, ...], Hashable]


def stored(piece: Piece, end: int) -> Stored:
    return tuple(piece.sequence.tokens[:end]), piece.sequence.salt


def _case(examples: int) -> type:
    case: type = Driven.TestCase
    return type(
        "Case",
        (case,),
        {
            "settings": settings(
                max_examples=examples,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
        },
    )


TestSome = _case(300)


@pytest.mark.slow
class TestMany(_case(10_000)):  # type: ignore[misc]
    """The same with many more runs."""


def run(scheduler: Scheduler, steps: int) -> None:
    """Run steps. Each new token is 7."""
    for _ in range(steps):
        plan = scheduler.plan()
        scheduler.done(plan.pieces)
        for sequence in plan.complete:
            scheduler.append(sequence, 7)


def test_a_prompt_is_cut_at_multiples_of_a_chunk() -> None:
    scheduler = Scheduler(Limits(**WIDE, step_tokens=8))
    sequence = scheduler.add(list(range(15)))
    first = scheduler.plan()
    assert [(p.first, p.count) for p in first.chunks] == [(0, 4), (4, 4)]
    scheduler.done(first.pieces)
    second = scheduler.plan()
    assert [(p.first, p.count, p.last) for p in second.chunks] == [(8, 4, False), (12, 3, True)]
    scheduler.done(second.pieces)
    scheduler.append(sequence, 99)
    assert [(p.first, p.count) for p in scheduler.plan().decodes] == [(15, 1)]


def test_new_tokens_come_before_prompts() -> None:
    scheduler = Scheduler(Limits(**{**WIDE, "sequences": 2}, step_tokens=6))
    scheduler.add([1, 2])
    run(scheduler, 1)
    scheduler.add(list(range(12)))
    plan = scheduler.plan()
    assert [p.sequence.order[0] for p in plan.decodes] == [0]
    assert [(p.sequence.order[0], p.first, p.count) for p in plan.chunks] == [(1, 0, 4)]


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = Scheduler(Limits(**WIDE, step_tokens=32))
    scheduler.add([*range(10), 50])
    run(scheduler, 1)
    other = scheduler.add([*range(10), 60])
    plan = scheduler.plan()
    assert [(p.first, p.count) for p in plan.chunks] == [(8, 3)]
    assert other.shared == 8 and other.blocks[:4] == scheduler.running[0].blocks[:4]


def test_a_prompt_that_is_known_as_a_whole_computes_its_last_chunk() -> None:
    scheduler = Scheduler(Limits(**WIDE, step_tokens=32))
    for _ in range(2):
        sequence = scheduler.add(list(range(8)))
        plan = scheduler.plan()
        scheduler.done(plan.pieces)
        scheduler.end(sequence)
    assert [(p.first, p.count) for p in plan.chunks] == [(4, 4)]


def test_the_last_to_arrive_loses_its_blocks() -> None:
    scheduler = Scheduler(TIGHT)
    old, young = scheduler.add([1, 2, 3, 4]), scheduler.add([5, 6, 7, 8])
    run(scheduler, 1)
    for _ in range(4):
        plan = scheduler.plan()
        scheduler.done(plan.pieces)
        for piece in plan.decodes:
            scheduler.append(piece.sequence, 9)
        if plan.preempted:
            break
    assert plan.preempted == [young] and young.computed == 0 and not young.blocks
    assert scheduler.running == [old] and list(scheduler.waiting) == [young]
    assert len(young.tokens) > 5, "it keeps the tokens that it has got"


def test_a_fork_shares_full_blocks_and_copies_the_last_one() -> None:
    scheduler = Scheduler(Limits(**WIDE, step_tokens=8))
    parent = scheduler.add([1, 2, 3])
    scheduler.done(scheduler.plan().pieces)
    child = scheduler.fork(parent)
    assert child.blocks[0] == parent.blocks[0] and child.blocks[1] != parent.blocks[1]
    for sequence in (parent, child):
        scheduler.append(sequence, 7)
    plan = scheduler.plan()
    assert plan.copies == [(parent.blocks[1], child.blocks[1])]
    assert len(plan.decodes) == 2


def test_a_prompt_that_can_never_fit() -> None:
    with pytest.raises(UsageError, match=r"13 tokens.*at most 12 tokens"):
        Scheduler(TIGHT).add([1] * 13)
    with pytest.raises(UsageError, match="at least one token"):
        Scheduler(TIGHT).add([])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 0}, "blocks must be a positive int, got 0"),
        ({"chunk": 3}, "multiple of a block"),
        ({"step_tokens": 7}, "room for a token of every sequence"),
    ],
)
def test_limits_that_cannot_work(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Limits(**{**WIDE, "step_tokens": 8, **changes})
