"""Grammars of calls allow what the parsers read as calls, and nothing else."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest

from tests.serving.chats.texts import BEGIN, END
from tpcompile.serving.chats.grammars import element_calls, json_calls, quoted

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "place": {"$ref": "#/$defs/Place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [{"name": "weather", "parameters": PARAMETERS}, {"name": "time"}]


LEXICON = llguidance.LLTokenizer("byte")


def allows(grammar: str, text: str) -> bool:
    """Return whether a text is a sentence of a grammar."""
    source = llguidance.LLMatcher.grammar_from_lark(grammar)
    assert not llguidance.LLMatcher.validate_grammar(source, LEXICON)
    matcher = llguidance.LLMatcher(LEXICON, source)
    tokens = LEXICON.tokenize_str(text)
    accepted = matcher.try_consume_tokens(tokens) == len(tokens)
    assert not matcher.get_error()
    return bool(accepted and matcher.is_accepting())


def call(text: str) -> str:
    return f"{BEGIN}\n{text}\n{END}"


TIME = call('{"name": "time", "arguments": {"any": [1]}}')
JSON: dict[str, tuple[str, bool]] = {
    "one": (TIME, True),
    "two": (f"{TIME}\n{TIME}", True),
    "the required ones": (call('{"name": "weather", "arguments": {"city": "<é>"}}'), True),
    "all": (
        call(
            '{"name": "weather", "arguments": {"city": "a", "unit": "F", "days": 2, '
            '"place": {"x": 1.5}}}'
        ),
        True,
    ),
    "text before": (f"a{TIME}", False),
    "text after": (f"{TIME}a", False),
    "another name": (call('{"name": "f", "arguments": {}}'), False),
    "a missing one": (call('{"name": "weather", "arguments": {}}'), False),
    "another value": (call('{"name": "weather", "arguments": {"city": 1}}'), False),
    "another parameter": (call('{"name": "weather", "arguments": {"city": "", "a": 1}}'), False),
    "not closed": (TIME[:-1], False),
    "spaces": (call('{"name": "time", "arguments": { "any": [1]}}'), False),
}


@pytest.mark.parametrize("name", JSON)
def test_calls_as_json(name: str) -> None:
    text, allowed = JSON[name]
    assert allows(json_calls(TOOLS, quoted, True), text) == allowed
    if name == "two":
        assert not allows(json_calls(TOOLS, quoted, False), text)


@pytest.mark.parametrize(
    "schema", [{"format": "x-y"}, {"oneOf": [{"type": "string"}, {"minLength": 1}]}], ids=str
)
def test_parts_of_schemas_that_are_not_supported_are_ignored(schema: dict[str, Any]) -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}]
    text = call('{"name": "f", "arguments": {"a": "b"}}')
    assert allows(json_calls(tools, quoted, True), text)


def parameter(name: str, text: str) -> str:
    return f"<parameter={name}>\n{text}\n</parameter>\n"


def element(*parameters: str) -> str:
    return call(f"<function=weather>\n{''.join(parameters)}</function>")


CITY = parameter("city", "a </b>\n</parameter>.\n\n")
ELEMENTS: dict[str, tuple[str, bool]] = {
    "none": (call("<function=time>\n</function>"), True),
    "the required ones": (element(CITY), True),
    "all": (
        element(
            CITY, parameter("unit", "F"), parameter("days", "-2"), parameter("place", '{"x": 1}')
        ),
        True,
    ),
    "two": (f"{element(CITY)}\n{element(CITY)}", True),
    "a missing one": (element(parameter("unit", "F")), False),
    "another value": (element(CITY, parameter("unit", "K")), False),
    "text for a number": (element(CITY, parameter("days", "two")), False),
    "an unknown one": (element(CITY, parameter("a", "b")), False),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_calls_as_elements(name: str) -> None:
    text, allowed = ELEMENTS[name]
    assert allows(element_calls(TOOLS, quoted, True), text) == allowed
