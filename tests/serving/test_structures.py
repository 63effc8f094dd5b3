"""Structured output over HTTP: OpenAI's fields and vLLM's, by their clients and by hand."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pydantic
import pytest

from benchmarks.grammars.answers import is_instance
from tests.serving.conftest import KEY, Served, post
from tpcompile.serving import Structure
from tpcompile.serving.server.structures import take_structure
from tpcompile.serving.structure import StructureError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"cat": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["cat", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "cat", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "The grey cat of"}]


class Cat(pydantic.BaseModel):
    """An answer that OpenAI's client parses."""

    name: str = pydantic.Field(max_length=12)
    color: Literal["grey", "black"]
    lives: int


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)


def test_openai_parses_an_answer(served: Served) -> None:
    parse = client(served).chat.completions.parse
    for seed in range(3):
        answer = parse(model="demo", messages=MESSAGES, response_format=Cat, seed=seed)
        assert isinstance(answer.choices[0].message.parsed, Cat)
        assert answer.choices[0].finish_reason == "stop"


def test_a_stream_is_the_same_text(served: Served) -> None:
    create: Any = client(served).chat.completions.create
    options = {"model": "demo", "messages": MESSAGES, "response_format": FORMAT, "seed": 5}
    whole = create(**options).choices[0].message.content
    parts = [part.choices[0].delta.content or "" for part in create(**options, stream=True)]
    assert "".join(parts) == whole and is_instance(SCHEMA, whole)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(text, str)),
        ({"structured_outputs": {"json": SCHEMA}}, lambda text: is_instance(SCHEMA, text)),
        ({"guided_json": json.dumps(SCHEMA)}, lambda text: is_instance(SCHEMA, text)),
        ({"structured_outputs": {"json_object": True}}, lambda text: json.loads(text) != 0),
        ({"structured_outputs": {"regex": "[a-f]{3}"}}, re.compile("[a-f]{3}").fullmatch),
        ({"guided_regex": "[a-f]{3}"}, re.compile("[a-f]{3}").fullmatch),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"].__contains__),
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"].__contains__),
        ({"structured_outputs": {"grammar": 'start: "a" "b"?'}}, ["a", "ab"].__contains__),
        ({"guided_grammar": 'start: "a" "b"?'}, ["a", "ab"].__contains__),
    ],
)
def test_fields(served: Served, fields: Any, fits: Any) -> None:
    answer = post(served, "completions", {"prompt": "Anna is", "max_tokens": 90, **fields})
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop" and fits(choice["text"])
    body = {"messages": MESSAGES, "max_tokens": 90, **fields}
    message = post(served, "chat/completions", body).json()["choices"][0]["message"]
    assert fits(message["content"])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "regex": None}},
    ],
)
def test_fields_without_a_structure(fields: dict[str, Any]) -> None:
    assert take_structure(fields) == (None, "") and fields == {}


def test_the_schema_keeps_its_order() -> None:
    """Properties are written in the order of the schema."""
    structure, path = take_structure({"response_format": FORMAT})
    assert structure == Structure("json_schema", json.dumps(SCHEMA))
    assert path == "response_format.json_schema.schema"


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **schema}}}


INNER = "response_format.json_schema"
UNKNOWN = {"type": "object", "properties": {"a": {"type": "string", "format": "x-y"}}}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    (schema_of({"schema": UNKNOWN}), f"{INNER}.schema.properties.a.format", "Unknown format: x-y"),
    ({"guided_json": {"not": {}}}, "guided_json.not", "Unimplemented keys"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "A schema must be JSON"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
    ({"guided_choice": []}, "guided_choice", "a JSON list of texts"),
    ({"guided_choice": '["a"]'}, "guided_choice", "a JSON list of texts"),
    ({"guided_regex": 3}, "guided_regex", "must be a text"),
    ({"response_format": "json"}, "response_format", "must be an object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, INNER, "must be an object"),
    (schema_of({}), f"{INNER}.schema", "schema must be a JSON schema"),
    (schema_of({"schema": {}, "name": ""}), f"{INNER}.name", "name must be a text"),
    (schema_of({"schema": {}, "strict": 1}), f"{INNER}.strict", "strict must be true or false"),
    (schema_of({"schema": {}, "more": 1}), f"{INNER}.more", "'more' is not supported"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "'xml' is not supported"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.choice",
        "must be one kind",
    ),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
        "got also response_format",
    ),
]


@pytest.mark.parametrize(("fields", "path", "message"), WRONG)
def test_wrong_fields(served: Served, fields: Any, path: str, message: str) -> None:
    answer = post(served, "chat/completions", {"messages": MESSAGES, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, path)
    assert message in error["message"]


def test_wrong_fields_are_not_read_twice() -> None:
    with pytest.raises(StructureError, match="must be an object"):
        take_structure({"structured_outputs": []})


def test_many_clients(served: Served) -> None:
    """Each gets the text that it gets alone, with and without structures."""
    bodies: list[dict[str, Any]] = [
        {"prompt": "Anna is", "seed": seed, "max_tokens": 40, "temperature": seed % 2}
        | ({"response_format": FORMAT} if seed % 3 else {})
        for seed in range(12)
    ]

    def text(body: dict[str, Any]) -> str:
        return str(post(served, "completions", body).json()["choices"][0]["text"])

    alone = [text(body) for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(text, bodies)) == alone
