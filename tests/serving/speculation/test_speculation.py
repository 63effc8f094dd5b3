"""Guesses change no bit: tokens and log-probabilities are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import tpcompile
from tests.backends.reference.stepping import EXPERTS, OWN, with_lively_routers
from tests.runtime.eager_pair import enlivened, lively
from tests.serving.speculation.oracle import Oracle
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.kv.cache import Guesses
from tpcompile.serving import Engine, SamplingParams
from tpcompile.serving.plan import Limits, Piece, Sequence
from tpcompile.serving.scheduler import Scheduler
from tpcompile.serving.speculation import Speculation

SMALL = {"chunk": 32, "max_tokens_per_step": 64}
WIDER = {"chunk": 64, "max_tokens_per_step": 128}
Result = list[tuple[list[Any], str | None]]


def requests(dice: Random, count: int, tokens: int = 199) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of parts that repeat, with all kinds of options."""
    made = []
    for number in range(count):
        part = [dice.randrange(tokens) for _ in range(dice.randrange(1, 12))]
        options: dict[str, Any] = dice.choice(
            [
                {},
                {"logprobs": 2},
                {"temperature": 0.8, "seed": number, "logprobs": 0},
                {"temperature": 1.2, "seed": number, "top_k": 20, "n": 2},
                {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_tokens": 3},
            ]
        )
        new = dice.randrange(1, 40)
        made.append((part * dice.randrange(1, 5), SamplingParams(max_tokens=new, **options)))
    return made


def answers(model: Any, asked: Any, *, abort: int | None = None, **options: Any) -> list[Result]:
    """Return all tokens of requests, with their log-probabilities, and why each has ended."""
    sizes = WIDER if model.keeps_states else SMALL
    with Engine(model, **sizes, **options) as engine:
        handles = [engine.add(*each) for each in asked]
        if abort is not None:
            for _ in range(5):
                engine.step()
            handles.pop(abort).abort()
        results = [[(one.chosen, one.finish) for one in each.result()] for each in handles]
        assert engine.scheduler.blocks.available == engine.scheduler.limits.blocks
        assert engine.scheduler.states.available == engine.scheduler.limits.states
    return results


def texts(asked: Any, results: list[Result]) -> list[list[int]]:
    """Return prompts with their continuations."""
    return [
        [*tokens, *(each.token for each in chosen)]
        for (tokens, _), result in zip(asked, results, strict=True)
        for chosen, _ in result
    ]


def _dense(dtype: torch.dtype) -> Any:
    return lively("tiny-qwen3").to(dtype)


def _experts(dtype: torch.dtype) -> Any:
    model = with_lively_routers(enlivened(AutoConfig.for_model(**OWN[EXPERTS])))
    return model.to(dtype)


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
    asked = requests(Random(1), 10)
    plain = answers(model, asked)
    known = texts(asked, plain)
    before = model.steps
    for right in (1.0, 0.8, 0.0):
        assert answers(model, asked, speculate=Oracle(known, right), max_batch=4) == plain
    for speculate in ("prompt:5", "prompt"):
        assert answers(model, asked, speculate=speculate, max_batch=3) == plain
    drafted, accepted = (now - past for now, past in zip(model.steps[2:], before[2:], strict=True))
    assert drafted > accepted > 100


def test_aborts_and_preemption(model: Any) -> None:
    """Preempted sequences are computed again as prompts, so tokens are compared in fp32 alone."""
    asked = requests(Random(2), 8)
    plain = answers(model, asked)
    known = texts(asked, plain)
    oracle = Oracle(known, 0.9)
    assert answers(model, asked, abort=3, speculate=oracle) == plain[:3] + plain[4:]
    assert oracle.forgotten
    if model.dtype == torch.float32:
        few = answers(model, asked, speculate=Oracle(known, 0.9), kv_tokens=192)
        assert texts(asked, few) == known


def test_fewer_steps() -> None:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as model:
        asked = [([5, 6, 7], SamplingParams(max_tokens=60))]
        known = texts(asked, answers(model, asked))
        with Engine(model, speculate=Oracle(known, most=3), **SMALL) as engine:
            engine.add(*asked[0]).result()
            assert engine.steps <= 1 + 60 / 4 + 8  # the first steps measure
        assert model.steps.accepted >= 40


def test_a_draft_model() -> None:
    """The model itself is right about greedy tokens, and another one seldom."""
    eager = lively("tiny-qwen3")
    asked = requests(Random(3), 8)
    with (
        tpcompile.compile(eager, max_seq_len=160) as model,
        tpcompile.compile(lively("tiny-qwen3", seed=5), max_seq_len=100) as other,
    ):
        plain = answers(model, asked)
        for draft in (model, other):
            before = model.steps
            assert answers(model, asked, speculate=draft) == plain
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
        states = pytest.raises(UnsupportedError, match="must not have linear attention")
        with tpcompile.compile(lively("tiny-qwen3.5")) as draft, states:
            Engine(model, speculate=draft)


class _Never:
    """A drafter that is always wrong, and counts what it is asked for."""

    most, free = 8, False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, wanted: Any) -> list[list[int]]:
        self.asked.append(sum(each.most for each in wanted))
        return [[0] * each.most for each in wanted]

    def forget(self, key: Any) -> None: ...


def _steps(drafter: Any, tokens: int, right: bool) -> list[int]:
    """Return the guesses of each step of a sequence, whose guesses are right or wrong."""
    speculation, sequence = Speculation(drafter, Guesses()), Sequence((0, 0), [1, 2, 3])
    counts = []
    for _ in range(tokens):
        speculation.guess({sequence: 100})
        piece = Piece(sequence, len(sequence.tokens) - 1, 1, tuple(sequence.draft))
        sequence.draft = []
        counts.append(len(piece.guesses))
        speculation.timed([piece], 0.03 + 0.001 * len(piece.guesses))
        accepted = len(piece.guesses) if right else 0
        sequence.tokens += [7] * (accepted + 1)
        speculation.learn(piece, accepted)
    return counts


def test_guesses_end_if_they_are_wrong_and_are_tried_again() -> None:
    counts = _steps(_Never(), 200, right=False)
    assert counts[0] >= 4
    late = counts[100:]
    assert sum(late) <= 4 and max(late) == 1


def test_right_guesses_get_as_many_as_they_may() -> None:
    assert _steps(_Never(), 60, right=True)[-1] == 8 - 1  # eight rows, then sixteen


def test_free_guesses_are_tested_without_rows() -> None:
    """A free drafter that was wrong is used again when its guesses agree with what comes."""

    class Free(_Never):
        free = True

        def propose(self, wanted: Any) -> list[list[int]]:
            return [[7] * each.most for each in wanted]

    drafter, sequence = Free(), Sequence((0, 0), [1, 2, 3])
    speculation = Speculation(drafter, Guesses())
    for wrong in (True, False):
        for _ in range(80):
            speculation.guess({sequence: 100})
            piece = Piece(sequence, len(sequence.tokens) - 1, 1, tuple(sequence.draft))
            sequence.draft = []
            speculation.timed([piece], 0.03 + 0.001 * len(piece.guesses))
            sequence.tokens.append(8 if wrong else 7)
            speculation.learn(piece, 0 if wrong else len(piece.guesses))
        assert (len(piece.guesses) == 0) == wrong


def test_guesses_take_no_blocks_from_others() -> None:
    scheduler = Scheduler(Limits(blocks=2, block=32, chunk=32, step_tokens=64, sequences=2))
    one, other = (scheduler.add([number] * 30) for number in (1, 2))
    scheduler.done(scheduler.plan().pieces)
    for sequence in (one, other):
        scheduler.append(sequence, 5)
    one.draft, other.draft = [1] * 8, [1]
    plan = scheduler.plan()
    assert [len(piece.guesses) for piece in plan.decodes] == [0, 1]
    assert not plan.preempted and not one.draft and not other.draft


def test_wanted_is_at_most_the_room() -> None:
    """No guess goes beyond the last token that a request may have."""
    ends: list[int] = []

    class Greedy(_Never):
        def propose(self, wanted: Any) -> list[list[int]]:
            ends.extend(len(each.tokens) + each.most for each in wanted)
            return [[0] * each.most for each in wanted]

    compiled = tpcompile.compile(lively("tiny-qwen3"), max_seq_len=64)
    with compiled as model, Engine(model, speculate=Greedy()) as engine:
        (found,) = engine.add([1, 2, 3], SamplingParams(max_tokens=9)).result()
    assert len(found.tokens) == 9
    assert max(ends) == 3 + 9 - 1
