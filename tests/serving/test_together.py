"""Requests of all kinds at once, with an adapter: each has the answer that it has alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

import tpcompile
from tests.adapters import adapter
from tests.serving.clients.conftest import assistant
from tests.serving.clients.weather import Forecast, Weather
from tests.serving.conftest import serve
from tests.serving.mixes import (
    CALLED,
    DRAWN,
    FORM,
    NAMED,
    SILENT,
    THINKING,
    TOOLS,
    USER,
    choices_of,
)
from tpcompile.serving import Engine
from tpcompile.serving.server.options import Options

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": SILENT | {"max_tokens": 30},
    "drawn": SILENT | DRAWN | {"seed": 1, "n": 2, "max_tokens": 30},
    "penalties": SILENT | DRAWN | {"seed": 2, "frequency_penalty": 0.5, "stop": ["a"]},
    "thinking": THINKING | {"max_tokens": 40},
    "thinking, drawn": THINKING | DRAWN | {"seed": 3, "n": 2, "max_tokens": 40},
    "required": SILENT | TOOLS | {"tool_choice": "required"},
    "named after thinking": THINKING | DRAWN | TOOLS | {"tool_choice": NAMED, "seed": 4},
    "after a call": SILENT | TOOLS | {"messages": CALLED, "max_tokens": 30},
    "schema": SILENT | {"response_format": FORM},
    "schema after thinking": THINKING | DRAWN | {"response_format": FORM, "seed": 5, "n": 2},
    "calls or schema": SILENT | DRAWN | TOOLS | {"response_format": FORM, "seed": 6, "n": 3},
    "regex": SILENT | DRAWN | {"guided_regex": "(yes |no ){4,9}", "seed": 7},
    "choice": SILENT | {"guided_choice": ["sunny", "rainy"]},
    "any object": THINKING | {"response_format": {"type": "json_object"}},
}
Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[tpcompile.CompiledModel, Any]]:
    directory: Path = tmp_path_factory.mktemp("together")
    eager, tokenizer = assistant(directory / "demo", request.param)
    eager.save_pretrained(directory / "base")
    change = adapter(directory / "base", directory / "adapter", r=4, target_modules="all-linear")
    with tpcompile.compile(str(directory / "base"), tp=2, adapter=str(change)) as model:
        yield model, tokenizer


def test_answers_do_not_depend_on_company(served: Any) -> None:
    model, _ = served
    alone, steps = _answers(served, [False], together=False)
    before = model.steps
    plain, fewer = _answers(served, [False, True], together=True)
    assert plain == alone and fewer < steps
    assert model.steps.drafted == before.drafted
    guessed, _ = _answers(served, [True], together=True, speculate="prompt:6")
    assert guessed == alone
    assert model.steps.accepted > before.accepted
    _check_forms(alone)


def _check_forms(answers: Answers) -> None:
    for name in ("required", "named after thinking"):
        ((_, arguments),) = answers[name][0]["calls"]
        assert Weather.model_validate_json(arguments)
    for name in ("schema", "schema after thinking"):
        assert all(Forecast.model_validate_json(answer["content"]) for answer in answers[name])
    for answer in answers["calls or schema"]:
        assert answer["calls"] or Forecast.model_validate_json(answer["content"])
    for name in ("named after thinking", "schema after thinking", "any object"):
        assert all(answer["reasoning_content"] for answer in answers[name])


def _answers(
    served: Any, streams: list[bool], together: bool, **options: Any
) -> tuple[Answers, int]:
    """Return answers, which are equal whole and in streams, and the steps of the engine."""
    model, tokenizer = served
    with Engine(model, tokenizer=tokenizer, max_batch=8, **options).start() as engine:
        server, thread, url = serve(engine, Options("demo"))
        try:
            jobs = [(name, stream) for name in REQUESTS for stream in streams]
            Random(len(options)).shuffle(jobs)
            with ThreadPoolExecutor(len(jobs) if together else 1) as pool:
                answers = pool.map(lambda job: _answer(url, *job), jobs)
                by_job = dict(zip(jobs, answers, strict=True))
        finally:
            server.should_exit = True
            thread.join()
        steps = engine.steps
    for name, stream in jobs:
        assert by_job[name, stream] == by_job[name, streams[0]]
    return {name: by_job[name, streams[0]] for name in REQUESTS}, steps


def _answer(url: str, name: str, stream: bool) -> list[dict[str, Any]]:
    body = {"messages": USER, "temperature": 0, "max_tokens": 120, "logprobs": True}
    body |= REQUESTS[name] | {"stream": stream}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return choices_of(answer.text, body)
