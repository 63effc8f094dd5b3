"""Answers that must be calls, JSON, or either of them, after thinking that is free."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import tpcompile
from tests.serving.assistants import BODY, CALLS, THOUGHT, TOOLS, streamed, whole
from tests.serving.conftest import Served, post, post_to
from tests.serving.scripted import Scripts
from tpcompile.serving.chats.forms import TOOL_FORMS
from tpcompile.serving.server.options import Options

SHORT = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Köln", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SHORT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SHORT}}
    for name in ("weather", "time")
]
NAMED = {"type": "function", "function": {"name": "time"}}


def check_calls(message: Any, names: set[str]) -> None:
    assert message["content"] is None and message["tool_calls"]
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] in names
        assert arguments["city"] in ("Köln", "Rome") and 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("form", ["hermes", "qwen3-coder"])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_required_calls(server: Served, form: str, thinks: bool, choice: Any) -> None:
    """The model is free in its thinking, and after it nothing but calls may follow."""
    options = Options("demo", tool_parser=form)
    fields = {
        "tools": SHORT_TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": thinks},
        "thinking_budget": 6,
        "temperature": 1,
        "n": 4,
    }
    for seed in range(3):
        body = BODY | fields | {"seed": seed}
        answer = post_to(server.engine, options, "/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        for entry in answer.json()["choices"]:
            check_calls(entry["message"], {"time"} if choice == NAMED else {"weather", "time"})
            assert ("reasoning_content" in entry["message"]) == thinks
            assert entry["finish_reason"] == "tool_calls"


def test_required_calls_in_a_stream(server: Served, chat: Any) -> None:
    """They are those of the whole answer, although other requests run."""
    body = {"tools": SHORT_TOOLS, "tool_choice": "required", "temperature": 1, "seed": 3}
    body |= {"parallel_tool_calls": False, "thinking_budget": 4}
    handle = server.engine.add([5, 6, 7], tpcompile.SamplingParams(max_tokens=300))
    message = streamed(chat, body)
    handle.abort()
    (choice,) = whole(server, body)["choices"]
    assert [call[1:] for call in message["calls"]] == [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in choice["message"]["tool_calls"]
    ]
    assert message["reasoning_content"] == choice["message"]["reasoning_content"]


def test_a_schema_after_the_thinking(server: Served) -> None:
    """The grammar of an answer begins after the thinking, which is limited."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SHORT}}
    body = {"response_format": form, "thinking_budget": 5, "temperature": 1, "seed": 1}
    (choice,) = whole(server, body)["choices"]
    assert choice["message"]["reasoning_content"]
    assert json.loads(choice["message"]["content"]).keys() == {"city", "days"}
    (choice,) = whole(server, body | {"chat_template_kwargs": {"enable_thinking": False}})[
        "choices"
    ]
    assert "reasoning_content" not in choice["message"]
    assert json.loads(choice["message"]["content"]).keys() == {"city", "days"}


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SHORT}}
JSON = '{"city": "Rome", "days": 2}'
TWO_CALLS = CALLS.replace(" </tool_call>", "", 1)


@pytest.mark.parametrize("form", [FORM, {"type": "json_object"}], ids=lambda form: form["type"])
@pytest.mark.parametrize("thought", [THOUGHT, ""], ids=["thinks", "silent"])
def test_calls_or_json(server: Served, scripts: Scripts, form: Any, thought: str) -> None:
    """With tools, an answer of a form is JSON or calls, as the model decides."""
    fields = {"tools": TOOLS, "response_format": form, "n": 2}
    fields["chat_template_kwargs"] = {"enable_thinking": bool(thought)}
    body = scripts.say(thought + TWO_CALLS, thought + JSON) | fields
    calls, answer = whole(server, body)["choices"]
    names = [call["function"]["name"] for call in calls["message"]["tool_calls"]]
    assert (names, calls["finish_reason"]) == (["weather", "time"], "tool_calls")
    assert (answer["message"]["content"], answer["finish_reason"]) == (JSON, "stop")
    body = scripts.say(thought + "Yes.") | fields | {"n": 1}
    refused = post(server, "chat/completions", BODY | body)
    assert refused.status_code == 500 and "does not allow token" in refused.text


def test_no_calls_but_json(server: Served, scripts: Scripts) -> None:
    fields = {"tools": TOOLS, "tool_choice": "none", "response_format": FORM}
    silent = {"chat_template_kwargs": {"enable_thinking": False}}
    body = scripts.say(TWO_CALLS) | fields | silent
    refused = post(server, "chat/completions", BODY | body)
    assert refused.status_code == 500 and "does not allow token" in refused.text


def test_a_form_and_required_calls(server: Served) -> None:
    """The form is that of an answer without calls."""
    fields = {"tools": SHORT_TOOLS, "tool_choice": "required", "response_format": FORM}
    silent = {"chat_template_kwargs": {"enable_thinking": False}, "parallel_tool_calls": False}
    (choice,) = whole(server, fields | silent)["choices"]
    check_calls(choice["message"], {"weather", "time"})


def test_another_form_and_required_calls(server: Served) -> None:
    fields = {"tools": SHORT_TOOLS, "tool_choice": "required", "guided_regex": "a+"}
    answer = post(server, "chat/completions", BODY | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


CHATS = "/v1/chat/completions"


def test_calls_that_have_no_grammar(server: Served, scripts: Scripts) -> None:
    """They cannot be required, and an answer of a form has none."""
    TOOL_FORMS.add("plain", replace(TOOL_FORMS["hermes"], grammar=None))
    try:
        for parser in ("plain", "none"):
            options = Options("demo", tool_parser=parser)
            body = BODY | {"tools": SHORT_TOOLS, "tool_choice": "required"}
            answer = post_to(server.engine, options, CHATS, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
            body = BODY | scripts.say(JSON) | {"tools": SHORT_TOOLS, "response_format": FORM}
            body["chat_template_kwargs"] = {"enable_thinking": False}
            answer = post_to(server.engine, options, CHATS, body)
            assert answer.json()["choices"][0]["message"]["content"] == JSON
    finally:
        del TOOL_FORMS._entries["plain"]


def test_a_schema_that_no_grammar_can_spell(server: Served) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": 5}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = BODY | {"tools": tools, "tool_choice": "required"}
    answer = post_to(server.engine, Options("demo", tool_parser="qwen3-coder"), CHATS, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
