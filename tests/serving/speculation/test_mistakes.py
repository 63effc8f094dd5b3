"""Mistakes of speculation, put in one by one: each changes tokens, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import tpcompile
from benchmarks.oracle import Oracle
from benchmarks.speculation_bits import SIZES_WITH_STATES, requests, take_equal_times
from tests.runtime.eager_pair import lively
from tpcompile.errors import UsageError
from tpcompile.runtime.ranks import program
from tpcompile.serving import Engine, runs
from tpcompile.serving.scheduler import Scheduler
from tpcompile.serving.states import States

MOST_STEPS = 300


@pytest.fixture(scope="module")
def model() -> Iterator[tpcompile.CompiledModel]:
    """A model with layers of attention and of linear attention."""
    with tpcompile.compile(lively("tiny-qwen3.5"), max_seq_len=160) as compiled:
        yield compiled


class Subject:
    """Requests, their tokens without guesses, and those with guesses, half of which are wrong."""

    def __init__(self, model: Any) -> None:
        self._model, self._requests = model, requests(Random(4), 12, model.config.vocab_size)
        self.plain = self._tokens(None)

    def guessed(self) -> list[list[Any]]:
        texts = [
            [*tokens, *(chosen.token for chosen in answer)]
            for (tokens, params), answer in zip(self._requests, self.plain, strict=True)
            if params.n == 1
        ]
        return self._tokens(Oracle(texts, 0.5))

    def _tokens(self, speculate: Any) -> list[list[Any]]:
        """Return the tokens of each request after so many steps: an engine may get stuck."""
        sizes = {**SIZES_WITH_STATES, "max_batch": 3}
        with Engine(self._model, speculate=speculate, **sizes) as engine:
            take_equal_times(engine)
            handles = [engine.add(*request) for request in self._requests]
            for _ in range(MOST_STEPS):
                if not engine.step():
                    break
            events = [sorted(handle.ready(), key=lambda event: event.index) for handle in handles]
            return [
                # of each continuation
                [event.chosen for event in stream if event.chosen is not None]
                for stream in events
            ]


@pytest.fixture(scope="module")
def subject(model: Any) -> Subject:
    created = Subject(model)
    before = model.steps
    assert created.guessed() == created.plain
    drafted, accepted = (now - past for now, past in zip(model.steps[2:], before[2:], strict=True))
    assert drafted - accepted > 20 and accepted > 20
    return created


def test_a_row_that_sees_a_later_row(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    true = program.in_rows

    def seeing(step: Any) -> Any:
        row_step = true(step)
        if step.rows:
            counts = step.inputs["starts"].diff()
            row_step.inputs["lengths"].copy_(step.inputs["lengths"].repeat_interleave(counts))
        return row_step

    monkeypatch.setattr(program, "in_rows", seeing)
    with pytest.raises(UsageError, match="must continue the sequence of the row before it"):
        subject.guessed()


def test_a_state_of_a_rejected_row(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    true = States.accept
    monkeypatch.setattr(
        States, "accept", lambda self, sequence, _: true(self, sequence, len(sequence.guessed))
    )
    assert subject.guessed() != subject.plain


def test_a_length_advanced_by_drafts(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(self: Scheduler, sequence: Any, accepted: int) -> None:
        if sequence in self.running:
            sequence.computed += len(sequence.guessed)
            self.states.accept(sequence, accepted)

    monkeypatch.setattr(Scheduler, "accept", accept)
    assert subject.guessed() != subject.plain


def test_a_slot_of_a_rejected_row(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of rejected rows are counted by the next step of the sequence."""
    true, ends = runs.step_of, dict[Any, int]()

    def reading(pieces: Any, *arguments: Any, **options: Any) -> Any:
        step = true(pieces, *arguments, **options)
        for place, piece in enumerate(pieces):
            rejected = max(0, ends.get(piece.sequence, 0) - piece.first)
            blocks = int((step.inputs["tables"][place] >= 0).sum())
            longest = blocks * arguments[1].size
            lengths = step.inputs["lengths"]
            lengths[place] = min(longest, int(lengths[place]) + rejected)
            ends[piece.sequence] = piece.first + len(piece.tokens)
        return step

    monkeypatch.setattr(runs, "step_of", reading)
    assert subject.guessed() != subject.plain
