"""Thinking and calls of tools over HTTP: a real server and engine, whose choices are scripted."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch

from tests.serving.assistants import BODY, CALLS, THOUGHT, TOOLS, USER, streamed, whole
from tests.serving.conftest import TEMPLATE, Served, post, post_to
from tests.serving.scripted import Scripts
from tests.serving.test_server import measured
from tpcompile.serving.server.options import Options


def test_thinking_text_and_calls(server: Served, chat: Any, scripts: Scripts) -> None:
    text = THOUGHT + "I will look.\n" + CALLS
    body = scripts.say(text) | {"tools": TOOLS}
    answer = whole(server, body)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("I will look.", "tool_calls")
    assert message["reasoning_content"] == "Hm, 🐈."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Köln </tool_call>", "days": 2}'},
        {"name": "time", "arguments": "{}"},
    ]
    thought = len(scripts.tokens("<think>\nHm, 🐈.\n</think>"))
    usage = answer["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}
    assert usage["completion_tokens"] == len(scripts.tokens(text)) + 1
    pieces = streamed(chat, body)
    assert pieces["content"] == "I will look." and pieces["finish"] == "tool_calls"
    assert pieces["reasoning_content"] == "Hm, 🐈."
    assert [call[1:] for call in pieces["calls"]] == [
        [call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]
    ]
    assert len({call[0] for call in pieces["calls"]}) == 2


def test_arguments_come_as_they_are_generated(chat: Any, scripts: Scripts) -> None:
    body = BODY | scripts.say(CALLS) | {"tools": TOOLS}
    pieces = [
        piece.function.arguments
        for chunk in chat.create(stream=True, **body)
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert sum(map(bool, pieces)) > 10


@pytest.mark.parametrize("reading", ["whole", "stream"])
def test_a_call_that_is_cut_off_is_not_lost(
    server: Served, chat: Any, scripts: Scripts, reading: str
) -> None:
    """In a whole answer it is text; in a stream, what was sent stays a call."""
    text = "Well.\n" + CALLS
    cut = text[: text.index("days")]
    count = len(scripts.tokens(cut))
    body = scripts.say(text) | {"tools": TOOLS, "max_tokens": count}
    written = scripts.tokenizer.decode(scripts.tokens(text)[:count])
    if reading == "whole":
        (choice,) = whole(server, body)["choices"]
        assert choice["message"] == {"role": "assistant", "content": written}
        assert choice["finish_reason"] == "length"
    else:
        message = streamed(chat, body)
        ((_, name, arguments),) = message["calls"]
        assert (name, message["finish"]) == ("weather", "length")
        assert message["content"] == "Well." and written.endswith(arguments)
        assert arguments.startswith('{"city": "Köln')


def test_a_malformed_call_is_text(server: Served, chat: Any, scripts: Scripts) -> None:
    before = calls_of(server)
    text = CALLS.replace("}}", "}", 1)
    body = scripts.say(text) | {"tools": TOOLS}
    (choice,) = whole(server, body)["choices"]
    end = text.index("</tool_call>\n<") + len("</tool_call>")
    assert choice["message"]["content"] == text[:end]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
    message = streamed(chat, body)
    assert [call[1] for call in message["calls"]] == ["weather", "time"]
    assert text[:end].endswith(message["calls"][0][2] + message["content"])
    assert calls_of(server) == (before[0] + 2, before[1] + 2)


def calls_of(server: Served) -> tuple[float, float]:
    """Return the numbers of calls, and of those that were cut off or malformed."""
    matches = [
        re.search(rf"^tpcompile_{name} (\S+)$", measured(server), re.MULTILINE)
        for name in ("tool_calls_total", r'failures_total\{kind="tool_call"\}')
    ]
    calls, failures = [0.0 if match is None else float(match[1]) for match in matches]
    return calls, failures


def test_only_one_call(server: Served, chat: Any, scripts: Scripts) -> None:
    body = scripts.say(CALLS) | {"tools": TOOLS, "parallel_tool_calls": False}
    answer = whole(server, body)
    (choice,) = answer["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"
    first = CALLS[: CALLS.index("\n</tool_call>\n<tool_call>")]
    assert answer["usage"]["completion_tokens"] == len(scripts.tokens(first))
    message = streamed(chat, body)
    assert [call[1] for call in message["calls"]] == ["weather"]
    assert (message["content"], message["finish"]) == ("", "tool_calls")


def test_several_choices_with_log_probabilities(server: Served, scripts: Scripts) -> None:
    """One of them ends after its first call, and the others go on."""
    texts = ["Only text.", CALLS, THOUGHT + "Done.", CALLS + " and text"]
    body = scripts.say(*texts) | {"tools": TOOLS, "n": 4, "logprobs": True}
    choices = whole(server, body)["choices"]
    for choice, text in zip(choices, texts, strict=True):
        assert len(choice["logprobs"]["content"]) == len(scripts.tokens(text)) + 1
    assert [choice["message"]["content"] for choice in choices] == [
        *("Only text.", None, "Done.", " and text")
    ]
    assert [choice["finish_reason"] for choice in choices] == [
        *("stop", "tool_calls", "stop", "tool_calls")
    ]
    choices = whole(server, body | {"parallel_tool_calls": False})["choices"]
    assert [choice["message"]["content"] for choice in choices] == [
        "Only text.",
        None,
        "Done.",
        None,
    ]
    assert [len(choice["message"].get("tool_calls", ())) for choice in choices] == [0, 1, 0, 1]


def test_stop_texts_within_calls(server: Served, scripts: Scripts) -> None:
    body = scripts.say("Yes. " + CALLS) | {"tools": TOOLS, "stop": "days"}
    (choice,) = whole(server, body)["choices"]
    text = "Yes. " + CALLS
    assert choice["message"]["content"] == text[: text.index("days")]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}], ids=str
)
def test_without_tools_calls_are_text(
    server: Served, scripts: Scripts, fields: dict[str, Any]
) -> None:
    (choice,) = whole(server, scripts.say("Yes.\n\nNo.") | fields)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Yes.\n\nNo."}
    assert choice["finish_reason"] == "stop"


def test_thinking_that_the_template_begins_or_ends(
    server: Served, chat: Any, scripts: Scripts
) -> None:
    def message(text: str, **variables: Any) -> Any:
        body = scripts.say(text) | {"chat_template_kwargs": variables}
        (choice,) = whole(server, body)["choices"]
        pieces = streamed(chat, body)
        for name in ("content", "reasoning_content"):
            assert pieces[name] == choice["message"].get(name, "")
        return choice["message"]

    begun = message("Hm.\n</think>\n\nYes.", begun=True)
    assert (begun["reasoning_content"], begun["content"]) == ("Hm.", "Yes.")
    cut = message("Hm.", begun=True)
    assert (cut["reasoning_content"], cut["content"]) == ("Hm.", "")
    assert message("Yes.", enable_thinking=False) == {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize("begun", [False, True])
def test_a_budget_of_thinking(server: Served, scripts: Scripts, begun: bool) -> None:
    """The end is forced, and its log-probabilities are those of the model."""
    thought = "one two three four five six seven eight nine ten"
    script = scripts.tokens(thought)
    closing = scripts.tokens("\n</think>\n\n")
    mark = [] if begun else scripts.tokens("<think>")
    start = len(mark) + 5 + len(closing)
    text = ("" if begun else "<think>") + thought
    # After the forced tokens the script goes on where it would be without them.
    body = scripts.say(text) | {"logprobs": True, "thinking_budget": 5, "max_tokens": start + 3}
    body["chat_template_kwargs"] = {"begun": begun}
    answer = whole(server, body)
    (choice,) = answer["choices"]
    thinking = server.tokenizer.decode(script[:5])
    assert choice["message"]["reasoning_content"] == thinking.strip("\n")
    after = scripts.tokens(text)[start : start + 3]
    assert choice["message"]["content"] == server.tokenizer.decode(after)
    tokens = [*mark, *script[:5], *closing, *after]
    words = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert words == [server.tokenizer.decode([token]) for token in tokens]
    prompt = server.tokenizer.apply_chat_template(
        USER, add_generation_prompt=True, begun=begun, return_dict=True
    )["input_ids"]
    with torch.inference_mode():
        logits = server.eager(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits.float(), -1)[range(len(tokens)), tokens]
    for entry, logprob in zip(choice["logprobs"]["content"], wanted.tolist(), strict=True):
        assert math.isclose(entry["logprob"], logprob, abs_tol=1e-3)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == (
        len(mark) + 5 + closing.index(server.tokenizer.convert_tokens_to_ids("</think>")) + 1
    )


def test_parsers_that_are_off(server: Served, scripts: Scripts) -> None:
    options = Options("demo", tool_parser="none", reasoning_parser="none")
    body = BODY | scripts.say("Yes.") | {"tools": TOOLS}
    path = "/v1/chat/completions"
    answer = post_to(server.engine, options, path, body)
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}
    answer = post_to(server.engine, options, path, body | {"thinking_budget": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_budget")
    answer = post_to(server.engine, options, path, body | {"tool_choice": "required"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("named", [False, True])
def test_marks_of_the_template_that_are_no_tokens(
    served: Served, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Thinking is apart, and cannot be limited. The template may be one of several."""
    scripts = Scripts(served.tokenizer)
    scripts.install(monkeypatch)
    thinks = TEMPLATE + "{# </think> #}"
    template: Any = {"default": TEMPLATE, "tool_use": thinks} if named else thinks
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    path, options = "/v1/chat/completions", Options("demo")
    body = BODY | scripts.say("<think>Hm.</think>Yes.") | {"max_tokens": 60}
    answer = post_to(served.engine, options, path, body)
    message = {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}
    assert answer.json()["choices"][0]["message"] == message
    answer = post_to(served.engine, options, path, body | {"thinking_budget": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_budget")


def test_the_form_of_qwen3_coder(server: Served, scripts: Scripts) -> None:
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    options = Options("demo", tool_parser="qwen3-coder")
    answer = post_to(
        server.engine,
        options,
        "/v1/chat/completions",
        BODY | scripts.say(text) | {"tools": TOOLS},
    )
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln", "days": 2}


def test_histories_reach_the_template(
    server: Served, chat: Any, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    add = server.engine.add

    def recorded(prompt: Any, *rest: Any, **more: Any) -> Any:
        prompts.append(server.tokenizer.decode(prompt))
        return add(prompt, *rest, **more)

    monkeypatch.setattr(server.engine, "add", recorded)
    first = chat.create(**BODY, tools=TOOLS, extra_body=scripts.say(CALLS)).choices[0].message
    history: Any = [
        *USER,
        first,
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"},
        {"role": "tool", "tool_call_id": "", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "It rains.", "reasoning_content": "Hm."},
        {"role": "user", "content": "So?"},
    ]
    chat.create(**BODY | {"messages": history}, tools=TOOLS, extra_body=scripts.say("Yes."))
    assert prompts[1].startswith('weather time Call: <tool_call>{"arguments": }user: Anna ')
    assert prompts[1].endswith(
        'assistant: weather(city="Köln </tool_call>",days=2,)time() tool: rain tool: noon '
        "assistant: Hm.It rains. user: So? "
    )


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools": ({"tools": [{"type": "web"}]}, "tools", "tools[0] must be"),
    "choice": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "must be auto, none, requi"),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    "parallel": ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    "budget": ({"thinking_budget": -1}, "thinking_budget", "an integer of at least 0"),
    "messages": ({"messages": [{"content": "a"}]}, "messages", "messages[0] must have a role"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies(server: Served, name: str) -> None:
    fields, param, message = BAD[name]
    answer = post(server, "chat/completions", BODY | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
