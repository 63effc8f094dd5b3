"""Thinking and calls of tools over HTTP: a real server and engine, whose choices are scripted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

import tpcompile
from tests.serving.conftest import KEY, Served, post, post_to, serve
from tests.serving.scripted import Scripts
from tests.serving.test_server import measured
from tpcompile.demo.model import make_demo
from tpcompile.serving import Engine
from tpcompile.serving.server.options import Options

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    '{% if tools %}Call: <tool_call>{"arguments": }{% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}("
    "{% for k, v in call.function.arguments | items %}{{ k }}={{ v | tojson }},{% endfor %})"
    "{% endfor %} {% endfor %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif begun %}<think>\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("weather", "time")
]
USER: Any = [{"role": "user", "content": "Anna"}]
BODY: dict[str, Any] = {"model": "demo", "messages": USER, "max_tokens": 256}
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln </tool_call>", "days": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nHm, 🐈.\n</think>\n\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Provide a server whose tokenizer has the marks as special tokens."""
    directory = tmp_path_factory.mktemp("demo") / "demo"
    make_demo(directory, 3, 10)
    eager = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in MARKS], special_tokens=True)
    eager.resize_token_embeddings(len(tokenizer))
    tokenizer.chat_template = TEMPLATE
    with (
        tpcompile.compile(eager, max_seq_len=512) as model,
        Engine(model, tokenizer=tokenizer, max_batch=4).start() as engine,
    ):
        running, thread, url = serve(engine, Options("demo", KEY))
        yield Served(url, engine, eager, tokenizer)
        running.should_exit = True
        thread.join()


@pytest.fixture
def scripts(server: Served, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    scripts = Scripts(server.tokenizer)
    scripts.install(monkeypatch)
    return scripts


@pytest.fixture
def chat(server: Served) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    return client.chat.completions


def whole(server: Served, body: dict[str, Any]) -> Any:
    answer = post(server, "chat/completions", BODY | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(chat: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Return the message that the pieces of a stream join to, and why it ends."""
    known = {"tools", "tool_choice", "parallel_tool_calls", "stop", "n", "seed", "temperature"}
    options = {name: value for name, value in (BODY | body).items() if name in {*BODY, *known}}
    extra = {name: value for name, value in body.items() if name not in options}
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "calls": []}
    for chunk in chat.create(stream=True, extra_body=extra, **options):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for piece in choice.delta.tool_calls or ():
            if piece.id:
                assert (piece.index, piece.type) == (len(message["calls"]), "function")
                message["calls"].append([piece.id, piece.function.name, ""])
            message["calls"][piece.index][2] += piece.function.arguments or ""
        message["finish"] = choice.finish_reason
    return message


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
    found = [
        re.search(rf"^tpcompile_{name} (\S+)$", measured(server), re.MULTILINE)
        for name in ("tool_calls_total", r'failures_total\{kind="tool_call"\}')
    ]
    calls, failures = [0.0 if match is None else float(match[1]) for match in found]
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
    rest = len(mark) + 5 + len(closing)
    text = ("" if begun else "<think>") + thought
    # After the forced tokens the script goes on where it would be without them.
    body = scripts.say(text) | {"logprobs": True, "thinking_budget": 5, "max_tokens": rest + 3}
    body["chat_template_kwargs"] = {"begun": begun}
    answer = whole(server, body)
    (choice,) = answer["choices"]
    kept = server.tokenizer.decode(script[:5])
    assert choice["message"]["reasoning_content"] == kept.strip("\n")
    after = scripts.tokens(text)[rest : rest + 3]
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


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | function}]}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": None} | message]}


def call(**function: Any) -> dict[str, Any]:
    return said(tool_calls=[{"id": "1", "type": "function", "function": function}])


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools": ({"tools": {}}, "tools", "tools must be a list"),
    "type": ({"tools": [{"type": "web"}]}, "tools", "tools[0] must be"),
    "no name": (tool(name=None), "tools", "tools[0].function.name must be"),
    "bad name": (tool(name="a b"), "tools", "tools[0].function.name must be"),
    "twice": ({"tools": tool()["tools"] * 2}, "tools", "different names, got 'f' twice"),
    "description": (tool(description=1), "tools", "tools[0].function.description must be"),
    "schema": (tool(parameters=[]), "tools", "tools[0].function.parameters must be"),
    "array": (tool(parameters={"type": "array"}), "tools", "must be a JSON schema of an object"),
    "properties": (tool(parameters={"properties": {"a": 1}}), "tools", "must be a JSON schema"),
    "choice": (tool() | {"tool_choice": "any"}, "tool_choice", "must be auto, none, required"),
    "other": (
        tool() | {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "must name one of tools, got 'g'",
    ),
    "no function": (tool() | {"tool_choice": {"type": "function"}}, "tool_choice", "must be {"),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    "parallel": (tool() | {"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    "budget": ({"thinking_budget": -1}, "thinking_budget", "an integer of at least 0"),
    "no messages": ({"messages": []}, "messages", "a list that is not empty"),
    "no role": ({"messages": [{"content": "a"}]}, "messages", "messages[0] must have a role"),
    "no content": (said(), "messages", "messages[0].content must be a text"),
    "user": ({"messages": [{"role": "user"}]}, "messages", "messages[0].content must be a text"),
    "image": (said(content=[{"type": "image_url"}]), "messages", "messages[0].content must be"),
    "calls": (said(tool_calls={"a": 1}), "messages", "messages[0].tool_calls must be a list"),
    "user's": (said(role="user", tool_calls=[1]), "messages", "in a message of the assistant"),
    "call": (said(tool_calls=[1]), "messages", "messages[0].tool_calls[0] must have"),
    "no arguments": (call(name="f", arguments=3), "messages", "must be a JSON object"),
    "arguments": (call(name="f", arguments="{"), "messages", "function.arguments must be JSON"),
    "list": (call(name="f", arguments="[]"), "messages", "arguments must be a JSON object"),
    "deep": (call(name="f", arguments="[" * 100_000), "messages", "arguments must be JSON"),
    "half": (call(name="f", arguments='{"a": "\\ud800"}'), "messages", "must be JSON, in UTF-8"),
    "id": (said(role="tool", content="a", tool_call_id=1), "messages", "tool_call_id must be"),
    "thought": (said(content="a", reasoning_content=1), "messages", "reasoning_content must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies(server: Served, name: str) -> None:
    fields, param, message = BAD[name]
    answer = post(server, "chat/completions", BODY | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


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


def test_a_schema_and_required_calls(server: Served) -> None:
    fields = {"tools": SHORT_TOOLS, "tool_choice": "required", "guided_regex": "a+"}
    answer = post(server, "chat/completions", BODY | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
