"""Random requests with all fields that servers take, and their answers, whole or from a stream."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tests.serving.clients.weather import Forecast, weather_tool

SCHEMA = Forecast.model_json_schema()
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOLS = {"tools": [weather_tool()], "parallel_tool_calls": False}
NAMED = {"type": "function", "function": {"name": "weather"}}
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 7}
DRAWN = {"temperature": 1, "top_k": 50}
USER = [{"role": "user", "content": "no yes no yes Rome sunny"}]
CALLED = [
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]},
    {"role": "tool", "content": "no yes no yes no yes"},
]
LARK = 'start: "<" /[a-c]{2,9}/ ">"'

Part = dict[str, Any]
THOUGHTS: list[Part] = [SILENT, SILENT, THINKING, THINKING | {"thinking_budget": 0}]
DRAWS: list[Part] = [
    {},
    DRAWN,
    DRAWN | {"n": 2},
    {"top_p": 0.9, "temperature": 0.7, "n": 3},
    {"min_p": 0.02, "temperature": 1.5, "frequency_penalty": 0.5},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1},
]
ENDS: list[Part] = [
    {},
    {"stop": ["a", "Rome"]},
    {"stop_token_ids": [9, 11]},
    {"min_tokens": 9},
    {"ignore_eos": True},
    {"logit_bias": {"7": 3, "12": -100}},
]
FORMS: list[Part] = [
    {},
    {"response_format": FORM},
    {"response_format": {"type": "json_object"}},
    {"guided_json": SCHEMA},
    {"guided_regex": "(yes |no ){4,9}"},
    {"guided_choice": ["sunny", "rainy"]},
    {"guided_grammar": LARK},
    {"structured_outputs": {"regex": "[0-9]{1,30}"}},
]
CALLS: list[Part] = [
    TOOLS,
    TOOLS | {"tool_choice": "none"},
    TOOLS | {"tool_choice": "required"},
    TOOLS | {"tool_choice": NAMED},
    TOOLS | {"response_format": FORM},
    TOOLS | {"tool_choice": "required", "parallel_tool_calls": True},
]
ECHOES: list[Part] = [{}, {"echo": True, "logprobs": 2}]
MODELS = ("demo", "demo-with-adapter")


def random_chat(dice: Random) -> dict[str, Any]:
    """Return a chat that a server answers, with tools, thinking and structures in any mix."""
    parts = THOUGHTS, FORMS + CALLS, DRAWS, ENDS
    body: dict[str, Any] = {"temperature": 0, "seed": dice.randrange(99), "logprobs": True}
    for part in parts:
        body |= dice.choice(part)
    body["model"] = dice.choice(MODELS)
    body["messages"] = dice.choice((USER, CALLED))
    return body | {"max_tokens": dice.choice((9, 20, 60, 120))}


def random_text(dice: Random) -> dict[str, Any]:
    """Return a request to continue a text."""
    body: dict[str, Any] = {"prompt": "no yes no yes", "max_tokens": dice.randrange(20)}
    for part in (FORMS, DRAWS, ENDS):
        body |= dice.choice(part)
    return body | dice.choice(ECHOES)


VALUES: list[Any] = [
    *(None, 1, 0, -1, 1.5, "a", [], {}, [1], ["a"], True, 10**30, "\u0000", [[]], float("inf")),
    *("\ud800", "[", "required", "demo", {"role": "user"}, {"7": 100}, {"7": -100}),
    *([{"role": "user", "content": "a"}], [{"role": "assistant", "tool_calls": [{}]}], CALLED),
    *([{"type": "function", "function": {"name": "f", "parameters": {}}}], TOOLS["tools"], NAMED),
    *({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}, FORM),
    *({"regex": "a+"}, {"choice": ["a"], "json": None}, {"enable_thinking": True}, SCHEMA, LARK),
    *({"type": "object", "properties": {"a": {"format": "x"}}}, {"not": {}}, "(a", '{"a": 1}'),
]
NAMES = (
    *("prompt", "messages", "model", "max_tokens", "max_completion_tokens", "min_tokens", "n"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("logprobs", "top_logprobs", "echo", "stream", "stream_options", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "x", "user", "store"),
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "thinking_budget"),
    *("reasoning", "reasoning_effort", "response_format", "structured_outputs", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar"),
)
"""Fields, of which servers do not know some."""


def fuzzed_body(dice: Random) -> tuple[str, bytes]:
    """Return the path and the body of a request that is changed at random, or not at all."""
    path, draw = dice.choice((("completions", random_text), ("chat/completions", random_chat)))
    body = draw(dice) | {"max_tokens": dice.randrange(12)}
    body |= {name: dice.choice(VALUES) for name in dice.sample(NAMES, dice.choice((0, 1, 1, 2, 4)))}
    text = json.dumps(body)
    if dice.random() < 0.2:
        cut = dice.randrange(len(text))
        text = text[:cut] + dice.choice(["", "}", '"', "é"]) + text[cut + 1 :]
    return path, text.encode()


def choices_of(text: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer to a chat; those of a stream are joined."""
    stream = body.get("stream", False)
    choices = [_empty() for _ in range(body.get("n", 1))]
    for piece in _pieces(text) if stream else [json.loads(text)]:
        assert "error" not in piece, piece
        for choice in piece["choices"]:
            _join(choices[choice["index"]], choice, choice["delta" if stream else "message"])
    return choices


def _pieces(text: str) -> list[Any]:
    *events, last = text.strip().split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _empty() -> dict[str, Any]:
    texts = {"content": "", "reasoning_content": "", "finish": None}
    return texts | {"calls": [], "tokens": [], "logprobs": []}


def _join(joined: dict[str, Any], choice: Any, message: Any) -> None:
    """Add a message, or a piece of one."""
    for name in ("content", "reasoning_content"):
        joined[name] += message.get(name) or ""
    for call in message.get("tool_calls", ()):
        if call.get("id"):
            joined["calls"].append([call["function"]["name"], ""])
        joined["calls"][call.get("index", -1)][1] += call["function"].get("arguments", "")
    joined["finish"] = choice["finish_reason"] or joined["finish"]
    entries = (choice.get("logprobs") or {}).get("content", ())
    joined["tokens"] += [entry["token"] for entry in entries]
    joined["logprobs"] += [entry["logprob"] for entry in entries]
