"""An error that a request causes ends this request, and no other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

import tpcompile
from tests.runtime.eager_pair import lively
from tests.serving.test_engine import SMALL, alone, greedy, prompt
from tpcompile.errors import RankError, RequestError, UsageError
from tpcompile.serving import Engine, Event, Handle, SamplingParams, Scheduler, continuations
from tpcompile.serving.continuations import Continuations
from tpcompile.serving.sampling import Sampler
from tpcompile.serving.words import Words

pytestmark = pytest.mark.usefixtures("forked_launchers")

BAD = greedy(9, n=2, temperature=0.9, seed=666, stop="never", logprobs=2, prompt_logprobs=7)
"""The options of the request that fails; other requests differ in each of them."""
BAD_PROMPT = prompt(Random(1), 70)


class Panic(BaseException):
    """What tokenizers raise for an error of their own: it is no Exception."""


class Letters:
    """A tokenizer with one letter per token."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(0x4E00 + token) for token in tokens)


def is_bad(tokens: list[int]) -> bool:
    return tokens[: len(BAD_PROMPT)] == BAD_PROMPT


PLACES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "admission": (Scheduler, "add", lambda scheduler, tokens, *rest: is_bad(tokens)),
    "a sampler": (Sampler, "__init__", lambda sampler, params, *rest: params is BAD),
    "the second sampler": (
        Sampler,
        "__init__",
        lambda sampler, params, count, index, ends: params is BAD and index == 1,
    ),
    "stop texts": (Words, "__init__", lambda words, tokenizer, stop, shown: bool(stop)),
    "log-probabilities of the prompt": (
        continuations,
        "described",
        lambda token, logprobs, most: most == BAD.prompt_logprobs,
    ),
    "a fork": (Scheduler, "fork", lambda scheduler, sequence: is_bad(sequence.tokens)),
    "the choice of a token": (Sampler, "choose", lambda sampler, logits, tokens: is_bad(tokens)),
    "the last token": (
        Sampler,
        "choose",
        lambda sampler, logits, tokens: is_bad(tokens) and len(tokens) == len(BAD_PROMPT) + 8,
    ),
    "an appended token": (
        Scheduler,
        "append",
        lambda scheduler, sequence, _: is_bad(sequence.tokens),
    ),
    "the text of a token": (Words, "push", lambda words, token: bool(words._stop)),
    "the last text": (Words, "end", lambda words: bool(words._stop)),
    "a token for the caller": (
        Handle,
        "put",
        lambda handle, event: handle.params is BAD and isinstance(event, Event),
    ),
    "the last token for the caller": (
        Handle,
        "put",
        lambda handle, event: handle.params is BAD and getattr(event, "finish", None) == "length",
    ),
}
"""The methods that options of a request reach: where, and whether a call concerns this request."""


def break_at(place: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a method raise an error, if a call concerns the bad request."""
    owner, name, concerns = PLACES[place]
    method = getattr(owner, name)

    def broken(*args: Any) -> Any:
        if concerns(*args):
            raise error
        return method(*args)

    monkeypatch.setattr(owner, name, broken)


@pytest.fixture(scope="module")
def model() -> Iterator[tpcompile.CompiledModel]:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as compiled:
        yield compiled


OTHERS = [
    *((prompt(Random(2), 40), greedy(12)), (prompt(Random(3), 9), greedy(20))),
    (prompt(Random(4), 33), greedy(8, n=2, temperature=0.8, seed=5, logprobs=3)),
    (prompt(Random(5), 65), greedy(5, min_tokens=2, prompt_logprobs=1)),
]


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[Any]:
    """The results of all other requests in a quiet engine."""
    with Engine(model, tokenizer=Letters(), max_batch=4, chunk=32) as engine:
        answers = [engine.add(*request).result() for request in OTHERS]
    assert answers[0][0].tokens == alone(model, OTHERS[0][0], 12)
    return answers


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [ValueError("of one request"), Panic("of one request")], ids=repr)
def test_an_error_ends_one_request(
    model: Any,
    wanted: list[Any],
    place: str,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_at(place, error, monkeypatch)
    with Engine(model, tokenizer=Letters(), max_batch=4, **SMALL) as engine:
        first = [engine.add(*request) for request in OTHERS[:2]]
        bad = engine.add(BAD_PROMPT, BAD)
        later = [engine.add(*request) for request in OTHERS[2:]]
        with pytest.raises(RequestError, match=r"The request failed; others go on.*one request"):
            bad.result()
        assert [handle.result() for handle in [*first, *later]] == wanted
        assert not engine.step()
        assert engine.scheduler.blocks.available == engine.scheduler.limits.blocks
        monkeypatch.undo()
        assert len(engine.add(BAD_PROMPT, BAD).result()) == 2, "the engine is still sound"


def test_an_error_ends_one_request_of_a_thread(
    model: Any, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever: neither the caller of the bad request nor others."""
    break_at("a sampler", ValueError("of one request"), monkeypatch)
    with Engine(model, tokenizer=Letters(), max_batch=4, **SMALL).start() as engine:
        handles = [engine.add(*request) for request in OTHERS]
        bad = engine.add(BAD_PROMPT, BAD)
        with pytest.raises(RequestError):
            bad.result()
        assert [handle.result() for handle in handles] == wanted
        assert engine._loop._thread is not None and engine._loop._thread.is_alive()


def test_no_token_is_left(model: Any, wanted: list[Any]) -> None:
    """All tokens end the request, and none may come first: there is no probability to draw from."""
    params = SamplingParams(
        max_tokens=4, min_tokens=1, temperature=1, stop_tokens=tuple(range(1013))
    )
    with Engine(model, tokenizer=Letters(), max_batch=4, **SMALL) as engine:
        handles = [engine.add(*request) for request in OTHERS]
        with pytest.raises(UsageError, match="No token can be drawn"):
            engine.add([1, 2], params).result()
        assert [handle.result() for handle in handles] == wanted


def test_an_error_of_the_scheduler_reaches_every_request(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to no request. Nobody waits for a step that always fails."""
    with Engine(model, max_batch=4, **SMALL) as engine:
        handles = [engine.add([1, 2, 3], greedy(3)) for _ in range(2)]

        def fail(scheduler: Scheduler) -> None:
            raise ValueError("no plan")

        monkeypatch.setattr(Scheduler, "plan", fail)
        for handle in handles:
            with pytest.raises(ValueError, match="no plan"):
                handle.result()
        assert not engine._work


def test_a_rank_error_is_never_of_one_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_at("the choice of a token", RankError("rank 1 died"), monkeypatch)
    monkeypatch.setattr(model, "made_by", None)
    with Engine(model, tokenizer=Letters(), max_batch=4, **SMALL) as engine:
        other, bad = engine.add(*OTHERS[0]), engine.add(BAD_PROMPT, BAD)
        for handle in (bad, other):
            with pytest.raises(RankError, match="rank 1 died"):
                handle.result()
        assert engine.failure


def test_requests_that_fail_when_a_rank_dies(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has failed in the same step ends with its own error."""
    with Engine(model, tokenizer=Letters(), max_batch=4, **SMALL) as engine:
        other, bad = engine.add(*OTHERS[0]), engine.add([7], greedy(9, logprobs=1))
        failure = RankError("rank 1 died")

        def go_on(work: Continuations, piece: Any, results: Any) -> None:
            work._failed.setdefault(bad, ValueError("of one request"))
            raise failure

        monkeypatch.setattr(Continuations, "go_on", go_on)
        monkeypatch.setattr(model, "made_by", None)
        with pytest.raises(RankError):
            engine.step()
        with pytest.raises(RequestError, match="of one request"):
            bad.result()
        with pytest.raises(RankError, match="rank 1 died"):
            other.result()
