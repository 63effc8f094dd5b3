"""Schemas that are refused: the reason, and the place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.grammars.schemas import Schemas
from tests.serving.tokens import END, SIZE, byte_tokenizer
from tpcompile.serving import Structure
from tpcompile.serving.grammars import Grammars
from tpcompile.serving.refusals import path_of, refusal_of
from tpcompile.serving.structure import StructureError

OBJECT = {"type": "object", "required": ["a"]}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    created = Grammars(byte_tokenizer(), SIZE, frozenset([END]))
    yield created
    created.close()


def refused(grammars: Grammars, schema: Any) -> StructureError:
    with pytest.raises(StructureError) as raised:
        grammars.grammar(Structure("json_schema", json.dumps(schema)))
    return raised.value


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        ({"properties": {"a": {"format": "x-y"}}}, "properties.a.format", "Unknown format: x-y"),
        ({"not": {}}, "not", "Unimplemented keys"),
        ({"if": {"type": "string"}, "then": {}}, "if", "Unimplemented keys"),
        ({"items": {"anyOf": [{"type": "null"}, {"not": {}}]}}, "items.anyOf[1].not", "not"),
        ({"anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"not": {}}}}, "$defs.x.not", "not"),
        ({"$ref": "https://example.com/s"}, "$ref", "retrieving it failed"),
        ({"prefixItems": [{}, {"type": "strin"}]}, "prefixItems[1].type", "Invalid type"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum", "Unsatisfiable"),
        ({**OBJECT, "properties": {"a": False}}, "properties.a", "Unsatisfiable"),
        ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf", "oneOf"),
        ({"type": "object", "minProperties": 2}, "minProperties", "at most 1 more"),
        ({"required": ["a", "a"], "minProperties": 3}, "minProperties", "names, which are 1"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "not", "Unimplemented keys"),
        (False, "", "is not supported"),
        ({"properties": {"a": {"const": float("nan")}}}, "properties.a.const", "expected value"),
        ({"items": {"const": "\ud800"}}, "items.const", "hex escape"),
    ],
)
def test_the_place(grammars: Grammars, schema: Any, path: str, reason: str) -> None:
    error = refused(grammars, schema)
    assert error.path == path and reason in str(error)
    assert not path or f"At {path}" in str(error)


def test_two_places_of_one_reason(grammars: Grammars) -> None:
    schema = {"properties": {"a": {"not": {}}, "b": {"not": {}}, "c": {"uniqueItems": True}}}
    assert refused(grammars, schema).path in ("properties.a.not", "properties.b.not")


def test_random_schemas(grammars: Grammars) -> None:
    schemas = Schemas(1)
    for _ in range(150):
        schema, keys = schemas.refused()
        assert refused(grammars, schema).path == path_of(keys), json.dumps(schema)


def test_names_that_may_repeat(grammars: Grammars) -> None:
    """A required name and another one differ, so two properties are certain."""
    schema = {**OBJECT, "minProperties": 2, "properties": {"a": {"type": "integer"}}}
    grammars.grammar(Structure("json_schema", json.dumps(schema)))


def test_a_large_schema_is_compiled_few_times() -> None:
    """The place is found by bisection, so that a refusal is not expensive."""
    properties: dict[str, Any] = {f"p{number}": {"type": "integer"} for number in range(1000)}
    properties["p700"] = {"items": {"not": {}}}
    tries = []

    def refuse(schema: Any) -> str:
        tries.append(schema)
        return "not" if '"not"' in json.dumps(schema) else ""

    keys = ("properties", "p700", "items", "not")
    assert refusal_of({"properties": properties}, refuse) == ("not", keys)
    assert len(tries) < 25
