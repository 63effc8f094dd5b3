"""Answers to random JSON schemas: how many finish, and whether those that do are valid."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import jsonschema

import tpcompile
from benchmarks.grammars.schemas import Schemas
from tpcompile.serving import Engine, SamplingParams, Structure
from tpcompile.serving.structure import JSON_SCHEMA, StructureError

INVALID, REFUSED = "invalid", "refused"
_WAITING = 64


def answer_schemas(
    model: tpcompile.CompiledModel, tokenizer: Any, count: int, seed: int, tokens: int
) -> Counter[str]:
    """Let a model answer random schemas; count how the answers end.

    An answer that ends with "stop" and is not an instance of its schema counts as invalid.
    """
    ends: Counter[str] = Counter()
    with Engine(model, tokenizer=tokenizer, max_batch=16) as engine:
        requests = _requests(engine, Schemas(seed), count, tokens)
        while batch := list(islice(requests, _WAITING)):
            for schema, handle in batch:
                if handle is None:
                    ends[REFUSED] += 1
                    continue
                (completion,) = handle.result()
                ends[_end(schema, completion.text, str(completion.finish))] += 1
    return ends


def _requests(
    engine: Engine, schemas: Schemas, count: int, tokens: int
) -> Iterator[tuple[Any, Any]]:
    for number in range(count):
        schema = schemas.draw()
        structure = Structure(JSON_SCHEMA, json.dumps(schema))
        params = SamplingParams(max_tokens=tokens, temperature=1, seed=number, structure=structure)
        try:
            yield schema, engine.add([3 + number % 100], params)
        except StructureError:
            yield schema, None


def _end(schema: Any, text: str, finish: str) -> str:
    return finish if finish != "stop" or is_instance(schema, text) else INVALID


def is_instance(schema: Any, text: str) -> bool:
    """Return whether a text is JSON that a schema allows, with the formats that it names."""
    validator = jsonschema.Draft202012Validator
    checked = validator(schema, format_checker=validator.FORMAT_CHECKER)
    try:
        return bool(checked.is_valid(json.loads(text)))
    except ValueError:
        return False
