"""The structure of an answer: kinds, and what their texts must be."""

from __future__ import annotations

from typing import Any

import pytest

from tpcompile.errors import UsageError
from tpcompile.serving import SamplingParams, Structure

GOOD = [
    ("json_object", ""),
    ("json_schema", '{"type": "integer"}'),
    ("json_schema", "true"),
    ("regex", "[ab]+"),
    ("choice", '["yes", "no"]'),
    ("grammar", 'start: "a"'),
]


@pytest.mark.parametrize(("kind", "text"), GOOD)
def test_structures(kind: str, text: str) -> None:
    structure = Structure(kind, text, after="</think>")
    assert SamplingParams(structure=structure).structure == structure
    assert hash(structure) == hash(Structure(kind, text, "</think>"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("xml", "a"), "must be one of json_object, json_schema, regex, choice, grammar"),
        (("regex", ""), "of kind regex must not be empty"),
        (("json_object", "{}"), "of kind json_object must be empty"),
        (("json_schema", "{"), "A schema must be JSON: Expecting"),
        (("json_schema", "[" * 100_000), "A schema must be JSON"),
        (("json_schema", "3"), "must be an object, true or false"),
        (("choice", "yes"), "A choice must be JSON"),
        (("choice", "[]"), "must be a JSON list of texts"),
        (("choice", '["a", ""]'), "must be a JSON list of texts"),
        (("choice", '{"a": 1}'), "must be a JSON list of texts"),
        (("regex", 3), "text of a structure must be a text. Found 3"),
        (("regex", "a", "", 'start: "b"'), "of kind regex must not have an alternative"),
        (("json_object", "", "", None), "alternative of a structure must be a text"),
        (("regex", "a", None), "after of a structure must be a text"),
    ],
)
def test_wrong_structures(options: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Structure(*options)


def test_the_structure_of_a_request_is_one() -> None:
    structure: Any = {"kind": "json_object"}
    with pytest.raises(UsageError, match="structure must be a Structure or None"):
        SamplingParams(structure=structure)
