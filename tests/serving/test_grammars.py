"""The cache of compiled structures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.tokens import END, SIZE, byte_tokenizer
from tpcompile.serving import Structure
from tpcompile.serving.grammars import Grammars


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    created = Grammars(byte_tokenizer(), SIZE, frozenset([END]))
    yield created
    created.close()


def test_each_structure_is_compiled_once(grammars: Grammars) -> None:
    """Whether it follows a text does not matter, but texts of another grammar do."""
    plain = grammars.grammar(Structure("json_object"))
    after = grammars.grammar(Structure("json_object", after="x"))
    other = grammars.grammar(Structure("json_object", alternative='start: "a"'))
    assert plain._automaton is after._automaton is not other._automaton
    assert other.matcher([END]).forbidden().sum() < plain.matcher([END]).forbidden().sum()


def test_the_least_recently_used_are_forgotten(grammars: Grammars) -> None:
    first, second = (grammars.grammar(Structure("regex", text)) for text in ("b", "c"))
    for number in range(62):
        grammars.grammar(Structure("regex", f"a{{{number + 1}}}"))
    assert grammars.grammar(Structure("regex", "b"))._automaton is first._automaton
    grammars.grammar(Structure("regex", "d"))
    assert len(grammars._compiled) == 64
    assert grammars.grammar(Structure("regex", "b"))._automaton is first._automaton
    assert grammars.grammar(Structure("regex", "c"))._automaton is not second._automaton
