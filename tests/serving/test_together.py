"""Requests of all kinds at once, with an adapter: each has the answer that it has alone."""

from __future__ import annotations

import json
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
from tests.serving.clients.weather import Forecast, Weather, weather_tool
from tests.serving.conftest import serve
from tpcompile.serving import Engine
from tpcompile.serving.server.options import Options

FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": Forecast.model_json_schema()}}
TOOLS = {"tools": [weather_tool()], "parallel_tool_calls": False}
NAMED = {"type": "function", "function": {"name": "weather"}}
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 7}
DRAWN = {"temperature": 1, "top_k": 50}
CALLED = [
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]},
    {"role": "tool", "content": "no yes no yes no yes"},
]
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
USER = [{"role": "user", "content": "no yes no yes Rome sunny"}]
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
    alone, steps = _answers(served, together=False)
    before = model.steps
    plain, fewer = _answers(served, together=True)
    assert plain == alone and fewer < steps / 2
    assert model.steps.drafted == before.drafted
    guessed, _ = _answers(served, together=True, speculate="prompt:6")
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


def _answers(served: Any, together: bool, **options: Any) -> tuple[Answers, int]:
    """Return whole answers, which equal those in streams, and the steps of the engine."""
    model, tokenizer = served
    with Engine(model, tokenizer=tokenizer, max_batch=8, **options).start() as engine:
        server, thread, url = serve(engine, Options("demo"))
        try:
            jobs = [(name, stream) for name in REQUESTS for stream in (False, True)]
            Random(len(options)).shuffle(jobs)
            with ThreadPoolExecutor(len(jobs) if together else 1) as pool:
                answers = pool.map(lambda job: _answer(url, *job), jobs)
                by_job = dict(zip(jobs, answers, strict=True))
        finally:
            server.should_exit = True
            thread.join()
        steps = engine.steps
    for name in REQUESTS:
        assert by_job[name, True] == by_job[name, False]
    return {name: by_job[name, False] for name in REQUESTS}, steps


def _answer(url: str, name: str, stream: bool) -> list[dict[str, Any]]:
    body = {"messages": USER, "temperature": 0, "max_tokens": 120, "logprobs": True}
    body |= REQUESTS[name] | {"stream": stream}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choices = [_empty() for _ in range(body.get("n", 1))]
    for piece in _pieces(answer.text) if stream else [answer.json()]:
        assert "error" not in piece, piece
        for choice in piece["choices"]:
            _join(choices[choice["index"]], choice, choice["delta" if stream else "message"])
    return choices


def _pieces(text: str) -> list[Any]:
    *events, last = text.strip().split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _empty() -> dict[str, Any]:
    return {"content": "", "reasoning_content": "", "calls": [], "finish": None, "logprobs": []}


def _join(joined: dict[str, Any], choice: Any, message: Any) -> None:
    """Add a message, or a piece of one."""
    for name in ("content", "reasoning_content"):
        joined[name] += message.get(name) or ""
    for call in message.get("tool_calls", ()):
        if call.get("id"):
            joined["calls"].append([call["function"]["name"], ""])
        joined["calls"][call.get("index", -1)][1] += call["function"].get("arguments", "")
    joined["finish"] = choice["finish_reason"] or joined["finish"]
    joined["logprobs"] += [
        (entry["token"], entry["logprob"])
        for entry in (choice.get("logprobs") or {}).get("content", ())
    ]
