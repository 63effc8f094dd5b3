"""The tokens that a structure allows: kinds, whitespace, the end, and free text before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.serving.tokens import END, SIZE, THINK_END, byte_tokenizer
from tpcompile.errors import RequestError
from tpcompile.serving import Structure
from tpcompile.serving.grammars import Grammars
from tpcompile.serving.matcher import Matcher

OTHER_END = 7
PADDING = SIZE - 1
"""A row of the head that is not a token."""


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    created = Grammars(byte_tokenizer(), SIZE, frozenset([END]))
    yield created
    created.close()


def matcher(grammars: Grammars, kind: str, text: str = "", after: str = "") -> Matcher:
    return grammars.grammar(Structure(kind, text, after)).matcher([END, OTHER_END])


def fits(matcher: Matcher, text: str) -> bool:
    """Return whether a text is allowed token by token, and may end there."""
    for token in byte_tokenizer().encode(text):
        if matcher.forbidden()[token]:
            return False
        matcher.accept(token)
    return matcher.complete or not matcher.forbidden()[END]


OBJECT = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"const": "x"}}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
LARK = 'start: "(" start ")" | WORD\nWORD: /[a-z]+/'


@pytest.mark.parametrize(
    ("kind", "structure", "text", "allowed"),
    [
        ("json_object", "", '{"name": [1, {"x": null}]}', True),
        ("json_object", "", "[1]", False),
        ("json_object", "", ' {"a": 1}', False),
        ("json_schema", OBJECT, '{"a": 1, "b": ["x", "x"]}', True),
        ("json_schema", OBJECT, '{"a":1}', True),
        ("json_schema", OBJECT, '{\n  "a": 1\n}', True),
        ("json_schema", OBJECT, '{"a":  1}', False),
        ("json_schema", OBJECT, '{"a":\n\n1}', False),
        ("json_schema", OBJECT, '{"b": ["x"]}', False),
        ("json_schema", OBJECT, '{"a": 1, "c": 2}', False),
        ("json_schema", OBJECT, '{"a": 1', False),
        ("json_schema", "true", "[null]", True),
        ("regex", "a+b?", "aab", True),
        ("regex", "a+b?", "b", False),
        ("choice", '["yes", "no", "yes!"]', "yes", True),
        ("choice", '["yes", "no", "yes!"]', "yes!", True),
        ("choice", '["yes", "no"]', "ye", False),
        ("choice", '["\\"\\u00fc\\n", "b"]', '"ü\n', True),
        ("choice", json.dumps(["😀", "a\x07\\\u2028"]), "😀", True),
        ("choice", json.dumps(["😀", "a\x07\\\u2028"]), "a\x07\\\u2028", True),
        ("grammar", LARK, "((anna))", True),
        ("grammar", LARK, "((anna)", False),
    ],
)
def test_texts(grammars: Grammars, kind: str, structure: str, text: str, allowed: bool) -> None:
    assert fits(matcher(grammars, kind, structure), text) is allowed


def test_a_name_cannot_be_written_as_escapes(grammars: Grammars) -> None:
    """Otherwise a second "a", of another type, would replace the first one."""
    schema = {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    text = json.dumps(schema | {"type": "object"})
    assert fits(matcher(grammars, "json_schema", text), '{"b": 3}')
    assert not fits(matcher(grammars, "json_schema", text), '{"\\u0061": 3}')


def test_the_end_is_allowed_only_where_the_text_may_end(grammars: Grammars) -> None:
    constraint = matcher(grammars, "regex", "ab?")
    first, second = byte_tokenizer().encode("a")[0], byte_tokenizer().encode("b")[0]
    assert constraint.forbidden()[[END, OTHER_END, PADDING, second]].all()
    constraint.accept(first)
    allowed = np.flatnonzero(~constraint.forbidden()).tolist()
    assert allowed == sorted([END, OTHER_END, second]) and not constraint.complete
    constraint.accept(second)
    assert constraint.complete


def test_an_empty_text_is_complete(grammars: Grammars) -> None:
    constraint = matcher(grammars, "grammar", 'start: ""')
    constraint.forbidden()
    assert constraint.complete


def test_a_mask_that_is_computed_ahead(grammars: Grammars) -> None:
    """It is used once: the next mask is computed, whether ahead or not."""
    ahead, then = (matcher(grammars, "choice", '["yes", "no"]') for _ in range(2))
    for place, token in enumerate(byte_tokenizer().encode("yes")):
        if place % 2 == 0:
            ahead.look_ahead(closes=False)
        assert np.array_equal(ahead.forbidden(), then.forbidden())
        ahead.accept(token)
        then.accept(token)
    assert ahead.complete and then.complete


def test_only_json_is_closed(grammars: Grammars) -> None:
    masks = []
    for closes in (False, True):
        constraint = matcher(grammars, "regex", '[a-z",\\]]+')
        constraint.look_ahead(closes)
        masks.append(constraint.forbidden())
    assert np.array_equal(*masks)


def test_a_grammar_that_cannot_be_continued(grammars: Grammars) -> None:
    loop = '{"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}'
    with pytest.raises(RequestError, match="The structure cannot be continued"):
        matcher(grammars, "json_schema", loop).forbidden()


def test_a_token_that_is_not_allowed(grammars: Grammars) -> None:
    constraint = matcher(grammars, "regex", "ab")
    with pytest.raises(RequestError, match="The structure does not allow token"):
        constraint.accept(byte_tokenizer().encode("b")[0])


@pytest.mark.parametrize("last", [THINK_END, "##\n", "aab"])
@pytest.mark.parametrize("space", ["", "\n\n", " \n "])
def test_a_structure_after_a_text(grammars: Grammars, last: str, space: str) -> None:
    for thought in ("", 'So {"a": 1} or a # a, ', "aa"):
        constraint = matcher(grammars, "json_object", after=last)
        assert fits(constraint, f"{thought}{last}{space}" + '{"id": 1}')


def test_free_text_does_not_end_the_sequence(grammars: Grammars) -> None:
    constraint = matcher(grammars, "json_object", after=THINK_END)
    assert np.flatnonzero(constraint.forbidden()).tolist() == [END]
    assert not fits(constraint, "So " + THINK_END)


def test_no_token_reaches_from_free_text_into_the_structure(grammars: Grammars) -> None:
    """A token `": ` that completes the text is allowed, and `": [` is not."""
    words: Any = byte_tokenizer()
    crossing = {
        token: word
        for token in range(len(words))
        if (word := words.decode([token])).startswith('":') and word.strip() != '":'
    }
    assert crossing, "the tokenizer has such tokens"
    constraint = matcher(grammars, "json_object", after='x":')
    constraint.accept(words.encode("x")[0])
    assert constraint.forbidden()[list(crossing)].all()
    assert not constraint.forbidden()[words.encode('":')].any()
    assert not constraint.forbidden()[words.encode('": ')].any()


def test_little_whitespace_before_the_structure(grammars: Grammars) -> None:
    constraint = matcher(grammars, "choice", '["yes"]', after=THINK_END)
    for token in byte_tokenizer().encode(THINK_END):
        constraint.accept(token)
    (newline,) = byte_tokenizer().encode("\n")
    for _ in range(4):
        assert constraint.forbidden()[[END, PADDING]].all() and not constraint.forbidden()[newline]
        constraint.accept(newline)
    assert constraint.forbidden()[newline] and fits(constraint, "yes")


def test_no_whitespace_within_the_structure(grammars: Grammars) -> None:
    constraint = matcher(grammars, "choice", '["yes"]', after=THINK_END)
    (newline,) = byte_tokenizer().encode("\n")
    for token in byte_tokenizer().encode(f"{THINK_END}y"):
        constraint.accept(token)
    assert constraint.forbidden()[newline]
