"""Guesses change no bit: tokens and log-probabilities are those of plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch

import tpcompile
from benchmarks.oracle import Oracle
from benchmarks.speculation_bits import SIZES, answers, requests, take_equal_times, texts
from tests.backends.reference.step_models import lively_experts
from tests.runtime.eager_pair import lively
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.kv.cache import Guesses
from tpcompile.serving import Engine, SamplingParams
from tpcompile.serving.plan import Limits, Piece, Sequence
from tpcompile.serving.scheduler import Scheduler
from tpcompile.serving.speculation import Speculation

TOKENS = 199


def _dense(dtype: torch.dtype) -> Any:
    return lively("tiny-qwen3").to(dtype)


def _experts(dtype: torch.dtype) -> Any:
    return lively_experts().to(dtype)


def _hybrid(dtype: torch.dtype) -> Any:
    return lively("tiny-qwen3.5").to(dtype)


MODELS: dict[str, tuple[Callable[[torch.dtype], Any], torch.dtype, dict[str, Any]]] = {
    "fp32": (_dense, torch.float32, {}),
    "bf16, 3 ranks": (_dense, torch.bfloat16, {"tp": 3}),
    "int4, 2 ranks": (_dense, torch.bfloat16, {"tp": 2, "weights": "int4:32"}),
    "KV in int8": (_dense, torch.bfloat16, {"kv": "int8"}),
    "linear attention": (_hybrid, torch.bfloat16, {}),
    "linear attention, 2 ranks": (_hybrid, torch.float32, {"tp": 2}),
    "experts, 2 ranks": (_experts, torch.bfloat16, {"tp": 2}),
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[tpcompile.CompiledModel]:
    make, dtype, options = request.param
    with tpcompile.compile(make(dtype), max_seq_len=160, **options) as compiled:
        yield compiled


def test_no_bit_depends_on_guesses(model: Any) -> None:
    batch = requests(Random(1), 6, TOKENS)
    plain = answers(model, batch)
    known = texts(batch, plain)
    before = model.steps
    for right in (1.0, 0.8, 0.0):
        assert answers(model, batch, speculate=Oracle(known, right), max_batch=4) == plain
    assert answers(model, batch, speculate="prompt", max_batch=3) == plain
    drafted, accepted = (now - past for now, past in zip(model.steps[2:], before[2:], strict=True))
    assert drafted > accepted > 100


def test_aborts_and_preemption(model: Any) -> None:
    """Preempted sequences are computed again as prompts, so tokens are compared in fp32 alone."""
    batch = requests(Random(2), 8, TOKENS)
    plain = answers(model, batch)
    known = texts(batch, plain)
    oracle = Oracle(known, 0.9)
    remaining = {number: result for number, result in plain.items() if number != 3}
    assert answers(model, batch, aborted=[3], speculate=oracle) == remaining
    assert oracle.forgotten
    preempted: set[int] = set()
    few = answers(model, batch, preempted=preempted, speculate=Oracle(known, 0.9), kv_tokens=192)
    assert preempted
    if model.dtype == torch.float32:
        assert texts(batch, few) == known
    assert all(few[number] == plain[number] for number in plain.keys() - preempted)


def test_fewer_steps() -> None:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as model:
        batch = [([5, 6, 7], SamplingParams(max_tokens=60))]
        known = texts(batch, answers(model, batch))
        with Engine(model, speculate=Oracle(known, most=3), **SIZES) as engine:
            take_equal_times(engine)
            engine.add(*batch[0]).result()
            assert engine.steps <= 1 + 60 / 4 + 8  # the first steps measure
        assert model.steps.accepted >= 40


def test_a_draft_model() -> None:
    """The model itself is right about greedy tokens, and another one seldom."""
    eager = lively("tiny-qwen3")
    batch = requests(Random(3), 8, TOKENS)
    with (
        tpcompile.compile(eager, max_seq_len=160) as model,
        tpcompile.compile(lively("tiny-qwen3", seed=5), max_seq_len=100) as other,
    ):
        plain = answers(model, batch)
        for draft in (model, other):
            before = model.steps
            assert answers(model, batch, speculate=draft) == plain
            assert model.steps.drafted > before.drafted
        greedy = [([5, 6, 7], SamplingParams(max_tokens=60))]
        before = model.steps
        answers(model, greedy, speculate=model)
        drafted, accepted = model.steps.drafted - before.drafted, model.steps.accepted
        assert accepted - before.accepted == drafted > 0


def test_what_cannot_speculate_is_refused() -> None:
    refused = pytest.raises(UnsupportedError, match="backend='torch'")
    with tpcompile.compile(lively("tiny-qwen3"), backend="torch") as model, refused:
        Engine(model, speculate="prompt:8")
    with tpcompile.compile(lively("tiny-qwen3")) as model:
        for wrong in ("prompt:0", "prompt:16", "prompt:x", "lookup", "prompt:-1"):
            with pytest.raises(UsageError, match="must be prompt:N, with N from 1 to 15"):
                Engine(model, speculate=wrong)
        vocabulary = pytest.raises(UsageError, match="must have the vocabulary of the model")
        with tpcompile.compile(_experts(torch.float32)) as draft, vocabulary:
            Engine(model, speculate=draft)


class _Never:
    """A drafter that is always wrong, and counts what it is asked for."""

    most, free = 8, False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, wanted: Any) -> list[list[int]]:
        self.asked.append(sum(item.most for item in wanted))
        return [[0] * item.most for item in wanted]

    def forget(self, key: Any) -> None: ...


def _steps(drafter: Any, steps: int, right: bool, later: float = 0.03) -> list[int]:
    """Return the guesses of each step of a sequence, whose guesses are right or wrong.

    After 100 steps, a step without guesses takes so long as `later`.
    """
    speculation, sequence = Speculation(drafter, Guesses(), 199), Sequence((0, 0), [1, 2, 3])
    counts = []
    for step in range(steps):
        speculation.guess({sequence: 100})
        piece = Piece(sequence, len(sequence.tokens) - 1, 1, tuple(sequence.draft))
        sequence.draft = []
        counts.append(number := len(piece.guesses))
        plain = later if step >= 100 else 0.03
        speculation.timed([piece], 0.03 + 0.001 * number if number else plain)
        accepted = len(piece.guesses) if right else 0
        sequence.tokens += [7] * (accepted + 1)
        speculation.learn(piece, accepted)
    return counts


def test_guesses_end_if_they_are_wrong_and_are_tried_again() -> None:
    counts = _steps(_Never(), 200, right=False)
    assert counts[:2] == [0, 0] and counts[2] >= 4  # plain steps are measured first
    late = counts[100:]
    assert sum(late) <= 4 and max(late) == 1


def test_right_guesses_get_as_many_as_they_may() -> None:
    assert _steps(_Never(), 60, right=True)[-1] == 8


def test_guesses_end_if_plain_steps_become_faster() -> None:
    """A step without guesses is measured from time to time, so the engine notices."""
    for seconds, guesses in ((0.03, True), (0.003, False)):
        counts = _steps(_Never(), 400, right=True, later=seconds)
        assert all(counts[60:100]) and any(counts[200:]) == guesses


def test_free_guesses_are_tested_without_rows() -> None:
    """A free drafter that was wrong is used again when its guesses agree with what comes."""

    class Free(_Never):
        free = True

        def propose(self, wanted: Any) -> list[list[int]]:
            return [[7] * item.most for item in wanted]

    drafter, sequence = Free(), Sequence((0, 0), [1, 2, 3])
    speculation = Speculation(drafter, Guesses(), 199)
    for wrong in (True, False):
        for _ in range(80):
            speculation.guess({sequence: 100})
            piece = Piece(sequence, len(sequence.tokens) - 1, 1, tuple(sequence.draft))
            sequence.draft = []
            speculation.timed([piece], 0.03 + 0.001 * len(piece.guesses))
            sequence.tokens.append(8 if wrong else 7)
            speculation.learn(piece, 0 if wrong else len(piece.guesses))
        assert (len(piece.guesses) == 0) == wrong


def test_prompts_and_new_programs_are_no_time_of_guesses() -> None:
    """A draft model computes the prompt of a new sequence, and makes programs now and then."""

    class Slow(_Never):
        def __init__(self, *pauses: float) -> None:
            super().__init__()
            self.pauses = list(pauses)

        def propose(self, wanted: Any) -> list[list[int]]:
            time.sleep(self.pauses.pop(0))
            return super().propose(wanted)

    drafter = Slow(*[0.05] * 5, *[0.001, 0.05, 0.001])
    speculation = Speculation(drafter, Guesses(), 199)
    for _ in range(2):  # plain steps are measured first
        speculation.timed([Piece(Sequence((9, 0), [1, 2, 3]), 2, 1)], 0.03)
    for number in range(5):
        speculation.guess({Sequence((number, 0), [1, 2, 3]): 1})
    assert speculation._per_guess(1) == 0
    sequence = Sequence((0, 0), [1, 2, 3])
    drafter.pauses.insert(0, 0.05)
    for _ in range(4):
        speculation.guess({sequence: 1})
        speculation.learn(Piece(sequence, 2, 1, (0,)), 0)
    assert 0.001 <= speculation._per_guess(1) < 0.05
    assert speculation._per_guess(2) == 0  # two sequences at once take another time


def test_guesses_that_cannot_pay_are_not_tried() -> None:
    """Although all are right, a drafter that is slower than the model is not asked again."""

    class Slow(_Never):
        def propose(self, wanted: Any) -> list[list[int]]:
            time.sleep(0.05 * max(item.most for item in wanted))
            return super().propose(wanted)

    counts = _steps(drafter := Slow(), 200, right=True)
    assert 0 < sum(map(bool, counts)) == len(drafter.asked) < 10
    assert not any(counts[20:])


def test_guesses_take_no_blocks_from_others() -> None:
    scheduler = Scheduler(Limits(blocks=2, block=32, chunk=32, step_tokens=64, sequences=2))
    first, second = (scheduler.add([number] * 30) for number in (1, 2))
    scheduler.done(scheduler.plan().pieces)
    for sequence in (first, second):
        scheduler.append(sequence, 5)
    first.draft, second.draft = [1] * 8, [1]
    plan = scheduler.plan()
    assert [len(piece.guesses) for piece in plan.decodes] == [0, 1]
    assert not plan.preempted and not first.draft and not second.draft


def test_guesses_that_are_no_tokens_end_no_request() -> None:
    """A drafter that breaks the protocol costs time alone: wrong guesses, and too many."""

    class Broken(_Never):
        def propose(self, wanted: Any) -> list[list[int]]:
            return [[3, 5, -1, 7, 10**9] * 20 for _ in wanted]

    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=64) as model:
        batch = [([1, 2, 3], SamplingParams(max_tokens=20))]
        assert answers(model, batch, speculate=Broken()) == answers(model, batch)
        assert model.steps.drafted > model.steps.accepted


def test_wanted_is_at_most_the_room() -> None:
    """No guess goes beyond the last token that a request may have."""
    ends: list[int] = []

    class Greedy(_Never):
        def propose(self, wanted: Any) -> list[list[int]]:
            ends.extend(len(item.tokens) + item.most for item in wanted)
            return [[0] * item.most for item in wanted]

    compiled = tpcompile.compile(lively("tiny-qwen3"), max_seq_len=64)
    with compiled as model, Engine(model, speculate=Greedy()) as engine:
        (completion,) = engine.add([1, 2, 3], SamplingParams(max_tokens=9)).result()
    assert len(completion.tokens) == 9
    assert max(ends) == 3 + 9 - 1
