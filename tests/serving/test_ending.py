"""JSON that is closed in time: any model's answer is complete before its last token."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest

from benchmarks.grammars.answers import is_instance
from tests.serving.tokens import END, SIZE, byte_tokenizer
from tpcompile.serving import Structure
from tpcompile.serving.ending import Ending, closes_from
from tpcompile.serving.grammars import Grammars
from tpcompile.serving.vocabulary import Vocabulary

NODE = {"value": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"const": None}]}}
SCHEMAS: dict[str, Any] = {
    "text": {"type": "string"},
    "escapes": {"type": "string", "pattern": '^\\\\*"*$'},
    "texts": {"type": "array", "items": {"type": "string"}, "minItems": 3},
    "numbers": {"type": "array", "items": {"type": "number"}},
    "number": {"type": "number"},
    "object": {"type": "object"},
    "list": {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"type": "object", "properties": NODE, "required": ["value", "next"]}},
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_it_is_closed(name: str) -> None:
    grammars = Grammars(byte_tokenizer(), SIZE, frozenset([END]))
    grammar = grammars.grammar(Structure("json_schema", json.dumps(SCHEMAS[name])))
    for seed in range(20):
        dice, matcher, tokens = Random(seed), grammar.matcher([END]), list[int]()
        while not matcher.complete and len(tokens) < 100:
            matcher.look_ahead(closes=len(tokens) >= 40)
            allowed = np.flatnonzero(~matcher.forbidden()).tolist()
            if matcher.complete:
                break
            allowed = [token for token in allowed if token != END]
            tokens.append(dice.choice(allowed))
            matcher.accept(tokens[-1])
        assert matcher.complete, byte_tokenizer().decode(tokens)
        assert is_instance(SCHEMAS[name], byte_tokenizer().decode(tokens))
    grammars.close()


NARROWED = [
    ('"a', '"b ', '"'),
    ('"a\\"', '"}', '"'),
    ("", '"{}1 ', "}"),
    ("", '"],1', "]"),
    ("1", ",1", ","),
    ("", '"1{[ \n', '"1'),
    ("", "{[", "{["),
    ("", " {", " {"),
]
"""A text so far, the bytes that may follow, and those that may follow when it is closed."""


@pytest.mark.parametrize(("text", "allowed", "left"), NARROWED)
def test_what_closes(text: str, allowed: str, left: str) -> None:
    vocabulary = Vocabulary(byte_tokenizer(), SIZE, frozenset([END]))
    ending = Ending(vocabulary)
    for token in byte_tokenizer().encode(text):
        ending.read(token)
    forbidden = np.ones(SIZE, np.bool_)
    forbidden[[vocabulary.single[char.encode()] for char in allowed]] = False
    ending.narrow(forbidden)
    words = [vocabulary.words[token].decode() for token in np.flatnonzero(~forbidden)]
    assert set(words) == set(left)


def test_when_it_begins() -> None:
    assert (closes_from(4096), closes_from(512), closes_from(40)) == (128, 128, 10)
