"""Tests of sampling defaults: what the generation configuration says where a request is silent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import GenerationConfig

import tpcompile
from tests.models import preset_pair
from tests.serving.conftest import Served, post
from tpcompile.errors import UsageError
from tpcompile.runtime.model import CompiledModel
from tpcompile.serving import Engine, SamplingParams
from tpcompile.serving.defaults import sampling_defaults

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
STATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({"eos_token_id": 1}, {}),
    "Qwen3": (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    "sampling alone": ({"do_sample": True}, {"temperature": 1.0}),
    "greedy": (
        {"do_sample": False, "max_new_tokens": 2048},
        {"temperature": 0.0, "max_tokens": 2048},
    ),
    "greedy, with a temperature": (
        {"do_sample": False, "temperature": 0.7},
        {"temperature": 0.0},
    ),
    "a penalty": (
        {"repetition_penalty": 1.05, "min_p": 0.1},
        {"repetition_penalty": 1.05, "min_p": 0.1},
    ),
    "no top-k": ({"do_sample": True, "top_k": 0}, {"temperature": 1.0, "top_k": None}),
}


@pytest.mark.parametrize("name", STATED)
def test_defaults_are_what_the_configuration_states(name: str) -> None:
    stated, defaults = STATED[name]
    assert sampling_defaults(GenerationConfig(**stated)) == defaults


def test_a_value_that_no_request_may_have() -> None:
    with pytest.raises(UsageError, match=r"temperature must be .* --generation-config none"):
        sampling_defaults(GenerationConfig(do_sample=True, temperature=1e-7))


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    eager = preset_pair("tiny-qwen3").eager
    with tpcompile.compile(eager, backend="torch", max_seq_len=64) as model:
        model.generation_config = GenerationConfig(**QWEN, max_new_tokens=7)
        yield model


def test_an_engine_takes_them_without_params(model: CompiledModel) -> None:
    wanted = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    with Engine(model) as engine:
        silent = engine.add([5, 6, 7])
        assert silent.params == wanted
        assert len(silent.result()[0].tokens) <= 7
        explicit = engine.add([5, 6, 7], SamplingParams())
        assert explicit.params == SamplingParams() and explicit.params.temperature == 0
        explicit.abort()


def chat(served: Served, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Anna is a baker . Felix"}]}
    answer = post(served, "chat/completions", {**body, "ignore_eos": True, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_a_server_takes_them_where_a_body_is_silent(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = text_of(chat(served, temperature=0, max_tokens=9))
    assert chat(served, temperature=0)["usage"]["total_tokens"] == 128
    seeds = range(8)
    assert {text_of(chat(served, max_tokens=9, seed=seed)) for seed in seeds} != {greedy}
    monkeypatch.setattr(served.engine, "defaults", {"temperature": 0.0, "max_tokens": 9})
    silent = [chat(served, seed=seed) for seed in seeds]
    assert {text_of(answer) for answer in silent} == {greedy}
    assert {answer["usage"]["completion_tokens"] for answer in silent} == {9}
    assert {text_of(chat(served, temperature=1, seed=seed)) for seed in seeds} != {greedy}
    assert chat(served, max_tokens=3)["usage"]["completion_tokens"] == 3
    body = {"prompt": "Anna is", "ignore_eos": True}
    assert post(served, "completions", body).json()["usage"]["completion_tokens"] == 16


def test_a_body_turns_a_default_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine, "defaults", {"top_k": 1, "temperature": 1.0})
    seeds = range(8)
    assert len({text_of(chat(served, max_tokens=9, seed=seed)) for seed in seeds}) == 1
    assert len({text_of(chat(served, max_tokens=9, seed=seed, top_k=-1)) for seed in seeds}) > 1
