"""Calls as Qwen3 writes them, and almost as it writes them."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from tests.serving.chats.texts import BEGIN, END
from tpcompile.serving.chats.assistant import Assistant
from tpcompile.serving.chats.calls import MarkedCalls
from tpcompile.serving.chats.hermes import JsonCall

GOOD: dict[str, tuple[str, Any]] = {
    "plain": ('{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}', {"a": [1, {"b": "}"}]}),
    "the name last": ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
    "without arguments": ('{"name": "f"}', {}),
    "another key": ('{"id": {"x": 1}, "name": "f", "arguments": {"a": 1}, "b": 2}', {"a": 1}),
    "a key between": ('{"name": "f", "id": {"x": 1}, "arguments": {"a": 1}}', {"a": 1}),
    "an object after the arguments": (
        '{"name": "f", "arguments": {"a": 1}, "b": {"c": 2}, "d": {}}',
        {"a": 1},
    ),
    "marks in a string": (
        '{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}',
        {"a": "</tool_call><tool_call>"},
    ),
    "escapes": ('{"name": "f", "arguments": {"a\\"": "\\\\\\" \\u00e9 {"}}', {'a"': '\\" é {'}),
    "half of a pair": ('{"name": "f", "arguments": {"a": "\\ud800"}}', {"a": "\ud800"}),
    "an escaped name": ('{"name": "\\u0066", "arguments": {}}', {}),
    "an object named arguments": (
        '{"name": "f", "arguments": {"arguments": {}}}',
        {"arguments": {}},
    ),
}
BAD = {
    "a brace is missing": '{"name": "f", "arguments": {"a": 1}',
    "no name": '{"arguments": {}}',
    "an empty name": '{"name": "", "arguments": {}}',
    "half of a pair in the name": '{"name": "\\ud800", "arguments": {}}',
    "arguments as text": '{"name": "f", "arguments": "{}"}',
    "arguments as a list": '{"name": "f", "arguments": [1]}',
    "two calls in a list": '[{"name": "f", "arguments": {}}]',
    "a name twice": '{"name": "f", "arguments": {}, "name": "g"}',
    "arguments twice": '{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}',
    "a line break in a string": '{"name": "f", "arguments": {"a": "\n"}}',
    "single quotes": "{'name': 'f', 'arguments': {}}",
    "a trailing comma": '{"name": "f", "arguments": {"a": 1,}}',
    "other brackets": '{"name": "f", "arguments": {"a": [1}]}',
    "not a number": '{"name": "f", "arguments": {"a": nul}}',
    "no number of JSON": '{"name": "f", "arguments": {"a": NaN}}',
    "no number either": '{"name": "f", "arguments": {"a": -Infinity}}',
    "nothing": "",
    "Qwen3-Coder's form": "<function=f>\n</function>",
    "deep": '{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "}",
}


def read(text: str, size: int) -> Assistant:
    reader = Assistant(None, MarkedCalls(partial(JsonCall, []), BEGIN, END))
    for place in range(0, len(text), size):
        reader.push(text[place : place + size])
    reader.push("", True)
    return reader


@pytest.mark.parametrize("name", GOOD)
def test_calls(name: str) -> None:
    text, arguments = GOOD[name]
    for size in (1, 5, 10**6):
        for space in ("", "\n", " \n\n"):
            reader = read(f"a{space}{BEGIN}{space}{text}{space}{END}{space}", size)
            (call,) = reader.message.calls
            assert (call.name, json.loads(call.arguments)) == ("f", arguments)
            assert (reader.message.content, reader.failed) == ("a", 0)


@pytest.mark.parametrize("name", BAD)
def test_text_that_is_no_call(name: str) -> None:
    text = f"a\n{BEGIN}\n{BAD[name]}\n{END}\nb"
    for size in (1, 7, 10**6):
        reader = read(text, size)
        assert (reader.message.content, reader.message.calls) == (text, [])
        assert reader.failed == 1


def test_the_next_call_after_a_broken_one() -> None:
    good = '{"name": "g", "arguments": {}}'
    reader = read(f"{BEGIN}{{'name'}}{END}\n{BEGIN}{good}{END}", 3)
    assert [call.name for call in reader.message.calls] == ["g"]
    assert reader.message.content == f"{BEGIN}{{'name'}}{END}"


@pytest.mark.parametrize("broken", ["b\n", "b\\\n"], ids=repr)
def test_a_string_with_a_line_break_hides_no_call(broken: str) -> None:
    good = '{"name": "g", "arguments": {}}'
    text = f'{BEGIN}{{"name": "f", "arguments": {{"a": "{broken}}}}}{END}'
    for size in (1, 10**6):
        reader = read(f"{text}{BEGIN}{good}{END}", size)
        assert [call.name for call in reader.message.calls] == ["g"]
        assert reader.message.content == text


@pytest.mark.parametrize("first", ["", '"id": "{", ', '"id": [{"x": 1}], ', '"id": "\\"{", '])
def test_arguments_are_passed_on_before_they_end(first: str) -> None:
    """A brace in a string or in a list does not begin the arguments."""
    reader = Assistant(None, MarkedCalls(partial(JsonCall, []), BEGIN, END))
    (call,) = reader.push(f'{BEGIN}{{{first}"name": "f", "arguments": {{"a": "b').calls
    assert (call.name, call.arguments) == ("f", '{"a": "b')


def test_the_closing_mark_may_be_missing() -> None:
    good = BEGIN + '{"name": "g", "arguments": {}}'
    reader = read(f"{good}\n{good}\n</tool_", 4)
    assert [call.name for call in reader.message.calls] == ["g", "g"]
    assert (reader.message.content, reader.failed) == ("", 0)


def test_a_long_call_is_read_in_linear_time() -> None:
    """Reading takes about ten times as long for a text of ten times the length."""
    text = BEGIN + json.dumps({"arguments": {"a": "b" * 300_000}, "name": "f"}) + END
    (call,) = read(text, 4).message.calls
    assert len(json.loads(call.arguments)["a"]) == 300_000


def test_many_objects_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of many objects does not take quadratic time."""
    parsed: list[str] = []
    loads = json.loads

    def counted(text: str, **options: Any) -> Any:
        parsed.append(text)
        return loads(text, **options)

    monkeypatch.setattr(json, "loads", counted)
    text = BEGIN + '{"id": {}, ' + '"x": {}, ' * 50 + '"name": "f", "arguments": {}}' + END
    assert not read(text, 9).message.calls  # a key occurs twice
    assert len(parsed) < 4


@pytest.mark.parametrize("text", ["b\n", "\nb \n", f"{BEGIN}{{'a'}}{END}\n"])
def test_text_after_a_call_keeps_its_spaces(text: str) -> None:
    for size in (1, 10**6):
        call = f'{BEGIN}{{"name": "g"}}{END}'
        assert read(call + text, size).message.content == text
        assert read(f"{call} \n", size).message.content == ""
