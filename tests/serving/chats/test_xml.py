"""Calls as Qwen3-Coder writes them: values by the schema, and marks within values."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from tests.serving.chats.texts import BEGIN, END
from tpcompile.serving.chats.assistant import Assistant
from tpcompile.serving.chats.calls import MarkedCalls
from tpcompile.serving.chats.xml import ElementCall

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "int": {"type": "integer"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "object": {"$ref": "#/$defs/Place"},
        "list": {"type": "array"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "choice": {"enum": ["a", "b"]},
        "level": {"enum": [1, 2]},
        "odd": {"type": 3, "enum": 5, "anyOf": "x", "$ref": "#/nowhere"},
        "any": True,
        "round": {"$ref": "#/$defs/Round"},
    },
    "$defs": {
        "Place": {"type": "object"},
        "Round": {"anyOf": [{"$ref": "#/$defs/Round"}] * 30 + [{"type": "integer"}]},
    },
}
VALUES: list[tuple[str, str, Any]] = [
    ("text", "a", "a"),
    ("text", "5", "5"),
    ("text", "null", "null"),
    ("text", "", ""),
    ("text", "\nfirst\n\nlast\n", "\nfirst\n\nlast\n"),
    ("text", '"a" \\n é 🐈', '"a" \\n é 🐈'),
    ("text", "<b></parameter>\n", "<b></parameter>\n"),
    ("text", "</parameter></parameter", "</parameter></parameter"),
    ("int", "5", 5),
    ("int", " -7 ", -7),
    ("int", "5.0", 5.0),
    ("int", "5.5", "5.5"),
    ("int", "five", "five"),
    ("int", "true", "true"),
    ("number", "1e3", 1000.0),
    ("number", "NaN", "NaN"),
    ("flag", "True", True),
    ("flag", "false", False),
    ("flag", "1", "1"),
    ("object", '{"a": [1,\n2]}', {"a": [1, 2]}),
    ("object", "[1]", "[1]"),
    ("list", '["</parameter>"]', ["</parameter>"]),
    ("list", "[1", "[1"),
    ("maybe", "null", None),
    ("maybe", "a", "a"),
    ("either", "5", 5),
    ("either", "x5", "x5"),
    ("choice", "a", "a"),
    ("level", "2", 2),
    ("odd", "5", "5"),
    ("any", "5", "5"),
    ("round", "5", 5),
    ("unknown", "5", "5"),
]


def read(text: str, size: int, schema: Any = SCHEMA) -> Assistant:
    tools = [{"name": "f", "parameters": schema}]
    reader = Assistant(None, MarkedCalls(partial(ElementCall, tools), BEGIN, END))
    for place in range(0, len(text), size):
        reader.push(text[place : place + size])
    reader.push("", True)
    return reader


def element(*values: tuple[str, str], name: str = "f") -> str:
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values)
    return f"{BEGIN}\n<function={name}>\n{parameters}</function>\n{END}"


@pytest.mark.parametrize(("key", "text", "value"), VALUES, ids=str)
def test_values_by_the_schema(key: str, text: str, value: Any) -> None:
    for size in (1, 6, 10**6):
        reader = read(f"a\n{element((key, text))}", size)
        (call,) = reader.message.calls
        assert json.loads(call.arguments) == {key: value}
        assert (call.name, reader.message.content) == ("f", "a")


def test_several_parameters_and_none() -> None:
    text = element(("text", "a"), ("int", "1"), ("other", "x")) + element() + element(name="g")
    calls = read(text, 3).message.calls
    assert [json.loads(call.arguments) for call in calls] == [
        {"text": "a", "int": 1, "other": "x"},
        {},
        {},
    ]


@pytest.mark.parametrize("schema", [None, {}, {"properties": 5}, {"$ref": "#"}, []], ids=str)
def test_schemas_that_say_nothing(schema: Any) -> None:
    (call,) = read(element(("int", "5")), 4, schema).message.calls
    assert json.loads(call.arguments) == {"int": "5"}


BAD = {
    "a parameter twice": element(("text", "a"), ("text", "b")),
    "no name": element(name=""),
    "another element": element().replace("</function>", "<value>1</value></function>"),
    "JSON": f'{BEGIN}\n{{"name": "f"}}\n{END}',
    "text between": element(("text", "a")).replace("<parameter", "so <parameter"),
    "a line break in a name": element(("a\nb", "c")),
    "no end": element(("text", "a")).replace("</function>", ""),
}


@pytest.mark.parametrize("name", BAD)
def test_text_that_is_no_call(name: str) -> None:
    for size in (1, 7, 10**6):
        reader = read(f"a\n{BAD[name]}\nb", size)
        assert reader.message.content == f"a\n{BAD[name]}\nb"
        assert (reader.message.calls, reader.failed) == ([], 1)


def test_long_text_is_passed_on_as_it_comes() -> None:
    reader = Assistant(
        None,
        MarkedCalls(partial(ElementCall, [{"name": "f", "parameters": SCHEMA}]), BEGIN, END),
    )
    reader.push(f"{BEGIN}\n<function=f>\n<parameter=text>\n")
    for line in ("one\n", 'two "2"\n', "</par"):
        (call,) = reader.push(line).calls or [None]  # type: ignore[list-item]
        assert line == "</par" or (call is not None and call.arguments)
    reader.push("ameter>\n</function>\n", True)
    (call,) = reader.message.calls
    assert json.loads(call.arguments) == {"text": 'one\ntwo "2"'}
