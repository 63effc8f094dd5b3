"""Values that are written as text become JSON by the types that their schema allows."""

from __future__ import annotations

from typing import Any

import pytest

from tpcompile.serving.chats.values import is_text, json_of

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
REFERRED = {"$defs": {"a/b~c": INTEGER}, "properties": {"a": {"$ref": "#/$defs/a~1b~0c"}}}
ESCAPED = {"$defs": {"~1": INTEGER}, "properties": {"a": {"$ref": "#/$defs/~01"}}}
REMOTE = {"$defs": {"x": INTEGER}, "properties": {"a": {"$ref": "http://a.example#/$defs/x"}}}


def of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


JSON: dict[str, tuple[Any, str, str]] = {
    "an integer": (of(INTEGER), " 5\n", "5"),
    "a float that is whole": (of(INTEGER), "5.0", "5.0"),
    "a float": (of(INTEGER), "5.5", '"5.5"'),
    "an integer as a number": (of({"type": "number"}), "5", "5"),
    "a flag as a number": (of({"type": "number"}), "true", '"true"'),
    "a flag of Python": (of({"type": "boolean"}), "True ", "true"),
    "a number as a flag": (of({"type": "boolean"}), "1", '"1"'),
    "a flag where there is none": (of({"type": "null"}), "True", '"True"'),
    "no number of JSON": (of({"type": "number"}), "Infinity", '"Infinity"'),
    "deep": (of({"type": "array"}), "[" * 50_000, '"' + "[" * 50_000 + '"'),
    "letters": (of(INTEGER), "é", '"é"'),
    "spaces of a text": (of({"type": ["integer", "string"]}), " a ", '" a "'),
    "a text with quotes": (of({"type": ["integer", "string"]}), '"a"', r'"\"a\""'),
    "one of": (of({"oneOf": [TEXT, INTEGER]}), "5", "5"),
    "any of": (of({"anyOf": [TEXT, INTEGER]}), "5", "5"),
    "all of": (of({"allOf": [{}, INTEGER]}), "5", "5"),
    "both and more": (of({"type": "null", "anyOf": [INTEGER]}), "null", "null"),
    "alternatives that are no list": (of({"anyOf": INTEGER, "type": "null"}), "null", "null"),
    "a constant": (of({"const": [1]}), "[1]", "[1]"),
    "values of two types": (of({"enum": [1, "a"]}), "1", "1"),
    "values and a type": (of({"type": "string", "enum": ["1", 2]}), "2", '"2"'),
    "another property": ({"additionalProperties": INTEGER}, "5", "5"),
    "no other property": ({"additionalProperties": False}, "5", '"5"'),
    "a property, not the others": ({**of(TEXT), "additionalProperties": INTEGER}, "5", '"5"'),
    "a reference": (REFERRED, "5", "5"),
    "a tilde in a reference": (ESCAPED, "5", "5"),
    "a reference to nothing": (of({"$ref": "#/$defs/x/y"}), "5", '"5"'),
    "a reference into a list": ({"x": [INTEGER], **of({"$ref": "#/x/0"})}, "5", '"5"'),
    "another document": (REMOTE, "5", '"5"'),
    "a circle": (of({"$ref": "#/properties/a"}), "5", '"5"'),
    "properties that are no object": ({"properties": [1]}, "5", '"5"'),
    "no schema": (None, "5", '"5"'),
}


@pytest.mark.parametrize("name", JSON)
def test_values_as_json(name: str) -> None:
    schema, text, expected = JSON[name]
    assert json_of(schema, "a", text) == expected


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (of(TEXT), True),
        (of({}), True),
        (of(INTEGER), False),
        (of({"type": ["string", "null"]}), False),
        (of({"enum": ["a", "b"]}), True),
        (of({"enum": ["a", 1]}), False),
        (of({"const": "a"}), True),
        (of({"enum": [[], {}]}), False),
    ],
    ids=str,
)
def test_values_that_are_texts(schema: Any, text: bool) -> None:
    assert is_text(schema, "a") is text
