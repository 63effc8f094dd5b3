"""Structured requests of an engine: their texts fit, and no request depends on another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tpcompile
from benchmarks.grammars.answers import INVALID, answer_schemas, is_instance
from tests.runtime.eager_pair import lively
from tests.serving.tokens import END, THINK_END, byte_tokenizer
from tpcompile.errors import RequestError, UsageError
from tpcompile.serving import Completion, Engine, SamplingParams, Structure
from tpcompile.serving.matcher import Matcher
from tpcompile.serving.sampling import Sampler
from tpcompile.serving.structure import StructureError

pytestmark = pytest.mark.usefixtures("forked_launchers")

SMALL = {"max_batch": 4, "chunk": 32, "max_tokens_per_step": 64}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["happy", "sad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
OF_PERSON = Structure("json_schema", json.dumps(PERSON))
DIGITS = Structure("regex", "[0-9]{1,30}")


@pytest.fixture(scope="module")
def model() -> Iterator[tpcompile.CompiledModel]:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as compiled:
        yield compiled


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine(model, tokenizer=byte_tokenizer(), **{**SMALL, **options})


def answer(model: Any, structure: Structure | None, **options: Any) -> Completion:
    params = SamplingParams(**{"max_tokens": 120, "structure": structure, **options})
    with engine_of(model) as engine:
        (completion,) = engine.add([5, 6], params).result()
    return completion


def test_structures_of_all_kinds(model: Any) -> None:
    for seed in range(3):
        drawn = {"temperature": 1, "seed": seed}
        person = answer(model, OF_PERSON, **drawn)
        assert person.finish == "stop" and is_instance(PERSON, person.text)
        assert isinstance(json.loads(answer(model, Structure("json_object"), **drawn).text), dict)
        assert re.fullmatch("[0-9]{1,30}", answer(model, DIGITS, **drawn).text)
        choice = answer(model, Structure("choice", '["red", "green"]'), **drawn)
        assert choice.text in ("red", "green") and choice.finish == "stop"
        lark = answer(model, Structure("grammar", 'start: "<" /[a-c]{2,4}/ ">"'), **drawn)
        assert re.fullmatch("<[a-c]{2,4}>", lark.text)


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_json_or_texts_of_another_grammar(model: Any, kind: str) -> None:
    text = OF_PERSON.text if kind == "json_schema" else ""
    other = 'start: "<" word ">"\nword: /[a-c]{2,4}/'
    texts = [
        answer(model, Structure(kind, text, alternative=other), temperature=1.5, seed=seed).text
        for seed in range(12)
    ]
    shaped = [re.fullmatch("<[a-c]{2,4}>", text) is not None for text in texts]
    assert {*shaped} == {True, False}
    for text, is_other in zip(texts, shaped, strict=True):
        assert is_other or is_instance(PERSON if kind == "json_schema" else {}, text)


def test_errors_of_a_schema_name_its_part_beside_another_grammar(model: Any) -> None:
    schema = json.dumps({"properties": {"a": {"not": {}}}})
    params = SamplingParams(structure=Structure("json_schema", schema, alternative='start: "a"'))
    with engine_of(model) as engine, pytest.raises(StructureError) as caught:
        engine.add([5], params)
    assert caught.value.path == "properties.a.not"


def mixed() -> list[tuple[list[int], SamplingParams]]:
    """Return requests with and without structures, greedy and drawn."""
    structures = (None, OF_PERSON, DIGITS, Structure("json_object"), None, OF_PERSON)
    requests = []
    for number, structure in enumerate(structures * 2):
        drawn = (
            {"temperature": 1.0, "seed": number, "top_k": 20, "top_p": 0.9} if number % 2 else {}
        )
        more = {"n": 2, "repetition_penalty": 1.1} if number % 5 == 1 else {"logprobs": 2}
        params = SamplingParams(max_tokens=30 + number, structure=structure, **drawn, **more)
        requests.append(([3 + number] * (1 + 7 * number % 40), params))
    return requests


def results(engine: Engine, requests: Any) -> list[list[Completion]]:
    handles = [engine.add(*request) for request in requests]
    return [handle.result() for handle in handles]


def texts(completions: list[list[Completion]]) -> list[Any]:
    """Return all but the log-probabilities, which differ by rounding if tokens are recomputed."""
    return [
        [(completion.tokens, completion.text, completion.finish) for completion in continuations]
        for continuations in completions
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_request_does_not_depend_on_others(tp: int) -> None:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160, tp=tp) as model:
        with engine_of(model) as engine:
            alone = [engine.add(*request).result() for request in mixed()]
        with engine_of(model) as engine:
            assert results(engine, mixed()) == alone
        with engine_of(model, kv_tokens=256) as engine:  # requests are preempted
            assert texts(results(engine, mixed())) == texts(alone)
            assert engine.scheduler.blocks.available == engine.scheduler.limits.blocks
    assert len({completion.text for continuations in alone for completion in continuations}) > 8


def test_continuations_of_a_request_have_matchers_of_their_own(model: Any) -> None:
    params = SamplingParams(max_tokens=90, temperature=1, seed=4, n=4, structure=OF_PERSON)
    with engine_of(model) as engine:
        completions = engine.add([9] * 40, params).result()
    assert all(is_instance(PERSON, completion.text) for completion in completions)
    assert len({completion.text for completion in completions}) == 4


def test_new_ranks_go_on_with_a_structure() -> None:
    eager = lively("tiny-qwen3")
    with tpcompile.compile(eager, max_seq_len=160) as model:
        with engine_of(model) as engine:
            expected = results(engine, mixed())
        with engine_of(model) as engine:
            handles = [engine.add(*request) for request in mixed()]
            for _ in range(9):
                engine.step()
            engine.restart(tp=3)
            assert texts([handle.result() for handle in handles]) == texts(expected)


def test_log_probabilities_are_those_of_the_model(model: Any) -> None:
    """A mask decides which token is chosen, and changes no log-probability."""
    completion = answer(model, DIGITS, logprobs=3, max_tokens=5)
    free = answer(model, None, logprobs=3, max_tokens=1)
    first = completion.chosen[0]
    assert first.top == free.chosen[0].top
    assert first.token not in [token for token, _ in first.top]
    assert first.logprob is not None and first.logprob < first.top[-1][1]


def test_a_text_that_cannot_go_on_ends_the_request(model: Any) -> None:
    completion = answer(model, Structure("choice", '["yes"]'), ignore_eos=True, min_tokens=20)
    assert (completion.text, completion.finish) == ("yes", "stop")
    assert END not in completion.tokens
    empty = answer(model, Structure("grammar", 'start: ""'))
    assert (empty.text, empty.finish, empty.tokens) == ("", "stop", [])


def test_ends_that_come_too_early(model: Any) -> None:
    """Until then, a text that may end goes on."""
    structure = Structure("regex", "[0-9]+")
    for options in ({"min_tokens": 20}, {"ignore_eos": True, "max_tokens": 20}):
        completion = answer(model, structure, temperature=1, seed=1, **options)
        assert len(completion.tokens) >= 20 and completion.text.isdigit()
    comma = byte_tokenizer().encode(",")[0]
    stopped = answer(model, Structure("regex", "a+,b"), temperature=1, stop_tokens=(comma,), seed=1)
    assert set(stopped.text) == {"a"} and stopped.finish == "stop"


def test_stop_texts(model: Any) -> None:
    completion = answer(model, OF_PERSON, stop=('"age',))
    assert completion.finish == "stop" and '"name"' in completion.text
    assert '"age' not in completion.text


def test_penalties_apply_to_what_is_allowed(model: Any) -> None:
    options = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    completion = answer(model, DIGITS, max_tokens=8, **options)
    assert completion.text.isdigit() and len(set(completion.tokens)) > 3


def test_a_structure_after_free_text(model: Any) -> None:
    structure = replace(OF_PERSON, after="e")
    completion = answer(model, structure, temperature=1, seed=3, max_tokens=150)
    free, _, person = completion.text.partition("e")
    assert completion.finish == "stop" and len(free) > 3
    assert is_instance(PERSON, person)
    never = answer(model, replace(DIGITS, after=THINK_END), max_tokens=20)
    assert never.finish == "length" and THINK_END not in never.text


def test_a_structure_that_no_token_continues(model: Any) -> None:
    """Its request fails, and no other one."""
    loop = Structure("json_schema", '{"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}')
    with engine_of(model) as engine:
        good, bad = (
            engine.add([7], SamplingParams(max_tokens=90, structure=structure))
            for structure in (OF_PERSON, loop)
        )
        with pytest.raises(
            RequestError, match=r"structure cannot be continued|No token is allowed"
        ):
            bad.result()
        assert is_instance(PERSON, good.result()[0].text)


def test_wrong_structures(model: Any) -> None:
    bad = Structure("json_schema", '{"properties": {"a": {"format": "x"}}}')
    with engine_of(model) as engine:
        for structure, message in (
            (bad, "Unknown format: x. At properties.a.format"),
            (Structure("regex", "(a"), "The regex is not supported: .*unclosed group"),
            (Structure("grammar", "start: x"), "The grammar is not supported: .*unknown name"),
        ):
            with pytest.raises(StructureError, match=message):
                engine.add([1], SamplingParams(structure=structure))
    with Engine(model) as engine, pytest.raises(UsageError, match="needs an engine with a tokeniz"):
        engine.add([1], SamplingParams(structure=DIGITS))


def test_random_schemas(model: Any) -> None:
    """A random model answers them: what is finished is valid, and almost everything is."""
    ends = answer_schemas(model, byte_tokenizer(), 100, seed=7, tokens=150)
    assert set(ends) <= {"stop", "length"} and INVALID not in ends
    assert ends["stop"] >= 85


def shifted(patch: pytest.MonkeyPatch) -> None:
    """Apply the mask of each token to the next one."""
    forbidden = Matcher.forbidden
    patch.setattr(Matcher, "forbidden", lambda matcher: np.roll(forbidden(matcher), 1))


def exchanged(patch: pytest.MonkeyPatch) -> None:
    """Give each continuation the matcher of the one that began before it."""
    from tpcompile.serving.grammars import Grammar

    matcher, last = Grammar.matcher, list[Any]()

    def previous(grammar: Any, ends: Any) -> Any:
        last.append(matcher(grammar, ends))
        return last[max(0, len(last) - 2)]

    patch.setattr(Grammar, "matcher", previous)


def still(patch: pytest.MonkeyPatch) -> None:
    """Do not advance the matcher."""
    patch.setattr(Matcher, "accept", lambda matcher, token: None)


def late(patch: pytest.MonkeyPatch) -> None:
    """Apply the mask after top-k."""
    choose = Sampler.choose

    def after(sampler: Sampler, logits: torch.Tensor, tokens: Any, forbidden: Any = None) -> Any:
        chosen = choose(sampler, logits, tokens)
        allowed = forbidden is None or not forbidden[chosen.token]
        return chosen if allowed else choose(sampler, logits * 0, tokens, forbidden)

    patch.setattr(Sampler, "choose", after)


@pytest.mark.parametrize("mistake", [shifted, exchanged, still, late])
def test_mistakes_are_noticed(model: Any, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixes with these mistakes fail, or differ from the requests alone."""

    def outcome(engine: Engine) -> Any:
        try:
            return results(engine, mixed())
        except RequestError:
            return None

    with engine_of(model) as engine:
        expected = outcome(engine)
    with monkeypatch.context() as patch:
        mistake(patch)
        with engine_of(model) as engine:
            assert outcome(engine) != expected
