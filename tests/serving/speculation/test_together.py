"""Guesses with structures, thinking, penalties, biases and stop texts: tokens as without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import tpcompile
from benchmarks.oracle import Oracle
from tests.runtime.eager_pair import lively
from tests.serving.conftest import post_to
from tests.serving.tokens import byte_tokenizer
from tpcompile.serving import Engine, SamplingParams, Structure
from tpcompile.serving.server.options import Options
from tpcompile.serving.thinking import ThinkingRules

SMALL = {"max_batch": 4, "chunk": 32, "max_tokens_per_step": 64}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": [1, 2]}},
    },
    "required": ["name", "tags"],
}
FORM = Structure("json_schema", json.dumps(SCHEMA))
REQUESTS = (
    ("The grey cat", SamplingParams(max_tokens=60, structure=FORM, logprobs=1)),
    ("Anna is", SamplingParams(max_tokens=60, structure=FORM, temperature=1.0, seed=1, n=2)),
    ("Anna is", SamplingParams(max_tokens=60, structure=Structure("regex", "(yes|no|maybe )+"))),
    ("no yes no yes", SamplingParams(max_tokens=50, stop=("a", "}"), temperature=0.9, seed=5)),
    ("yes yes yes", SamplingParams(max_tokens=50, logit_bias={7: 3.0}, frequency_penalty=0.7)),
    (
        "maybe red",
        SamplingParams(
            max_tokens=50,
            temperature=0.8,
            seed=9,
            thinking=ThinkingRules(5, 6, required=True, budget=8, closing=(9, 6, 9)),
        ),
    ),
)


@pytest.fixture(scope="module", params=["tiny-qwen3", "tiny-qwen3.5"])
def model(request: pytest.FixtureRequest) -> Iterator[tpcompile.CompiledModel]:
    with tpcompile.compile(lively(request.param), tp=2, max_seq_len=160) as compiled:
        yield compiled


def answers(model: Any, **options: Any) -> list[Any]:
    sizes = SMALL | ({"chunk": 64, "max_tokens_per_step": 128} if model.keeps_states else {})
    with Engine(model, tokenizer=byte_tokenizer(), **sizes, **options) as engine:
        handles = [engine.add(*request) for request in REQUESTS]
        return [
            [
                (completion.chosen, completion.text, completion.finish)
                for completion in handle.result()
            ]
            for handle in handles
        ]


def test_nothing_depends_on_guesses(model: Any) -> None:
    plain = answers(model)
    texts = [
        [*byte_tokenizer()(prompt)["input_ids"], *(choice.token for choice in chosen)]
        for (prompt, _), completions in zip(REQUESTS, plain, strict=True)
        for chosen, _, _ in completions
    ]
    before = model.steps
    for right in (1.0, 0.7):
        assert answers(model, speculate=Oracle(texts, right)) == plain
    assert answers(model, speculate="prompt:6") == plain
    assert model.steps.accepted - before.accepted > 50
    (shaped, _, finish), *_ = plain[0]
    assert finish == "stop" and shaped


def test_the_usage_of_a_request_counts_guesses(model: Any) -> None:
    body: dict[str, Any] = {
        "prompt": "no yes no yes no yes",
        "max_tokens": 30,
        "temperature": 0,
        "ignore_eos": True,
    }
    sizes = SMALL | ({"chunk": 64, "max_tokens_per_step": 128} if model.keeps_states else {})
    with Engine(model, tokenizer=byte_tokenizer(), **sizes) as engine:
        answer = post_to(engine.start(), Options("m"), "/v1/completions", body).json()
        handle = engine.add(body["prompt"], SamplingParams(max_tokens=30, ignore_eos=True))
        oracle = Oracle([handle.prompt + handle.result()[0].tokens], 0.6)
    assert "completion_tokens_details" not in answer["usage"]
    text = answer["choices"][0]["text"]
    with Engine(model, tokenizer=byte_tokenizer(), speculate=oracle, **sizes) as engine:
        answer = post_to(engine.start(), Options("m"), "/v1/completions", body).json()
    assert answer["choices"][0]["text"] == text
    details = answer["usage"]["completion_tokens_details"]
    assert details["rejected_prediction_tokens"] > 0
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
