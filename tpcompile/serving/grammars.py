"""Structures compiled to grammars, and a cache of them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from tpcompile.serving.ending import Ending
from tpcompile.serving.matcher import Matcher, Prelude
from tpcompile.serving.refusals import path_of, refusal_of
from tpcompile.serving.structure import (
    CHOICE,
    JSON_KINDS,
    JSON_OBJECT,
    JSON_SCHEMA,
    REGEX,
    Structure,
    StructureError,
)
from tpcompile.serving.vocabulary import Vocabulary

_MOST = 64
"""The grammars in the cache."""
_JSON = {
    "whitespace_pattern": r"[ ]|\n[ \t]{0,32}",
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,
    "coerce_one_of": False,
}
"""The format of JSON. Whitespace is bounded, so that a model cannot emit it endlessly. With
escapes as code points, a name of `properties` could be written as one of another property."""


class Grammar:
    """A compiled structure, from which each continuation gets a matcher."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        automaton: Any,
        structure: Structure,
        worker: ThreadPoolExecutor,
    ) -> None:
        self._vocabulary, self._automaton, self._worker = vocabulary, automaton, worker
        self._structure = structure

    def matcher(self, ends: Collection[int]) -> Matcher:
        """Return a matcher at the beginning. `ends` are the tokens that end the continuation."""
        vocabulary, after = self._vocabulary, self._structure.after
        prelude = Prelude(vocabulary, after.encode()) if after else None
        ending = Ending(vocabulary) if self._structure.kind in JSON_KINDS else None
        automaton = self._automaton.deep_copy()
        return Matcher(vocabulary, automaton, prelude, ending, ends, self._worker)


class Grammars:
    """The grammars of an engine. Any thread may ask for one; one thread computes all masks."""

    def __init__(self, tokenizer: Any, size: int, ends: frozenset[int]) -> None:
        """`size` is that of the model's vocabulary; `ends` are its tokens that end a sequence."""
        self._arguments = tokenizer, size, ends
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[tuple[str, str, str], Any] = OrderedDict()
        self._lock = Lock()
        self._worker = ThreadPoolExecutor(1, "masks")

    def grammar(self, structure: Structure) -> Grammar:
        """Return the grammar of a structure; raise StructureError if it is not supported."""
        vocabulary = self._tokens()
        key = structure.kind, structure.text, structure.alternative
        with self._lock:
            automaton = self._compiled.get(key)
        if automaton is None:
            automaton = _compiled(vocabulary, structure)
        with self._lock:
            self._compiled[key] = automaton
            self._compiled.move_to_end(key)
            if len(self._compiled) > _MOST:
                self._compiled.popitem(last=False)
        return Grammar(vocabulary, automaton, structure, self._worker)

    def forget(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._compiled.clear()

    def close(self) -> None:
        """End the thread that computes masks."""
        self._worker.shutdown()

    def _tokens(self) -> Vocabulary:
        """Return the vocabulary; the first call takes about a second."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(*self._arguments)
            return self._vocabulary


def _compiled(vocabulary: Vocabulary, structure: Structure) -> Any:
    if structure.kind != JSON_SCHEMA:
        automaton = _automaton(vocabulary, _source(vocabulary, structure))
        if reason := automaton.get_error():
            raise StructureError(f"The {structure.kind} is not supported: {_short(reason)}")
        return automaton

    def refuse(schema: Any) -> str:
        try:
            return str(_automaton(vocabulary, _schema(vocabulary, schema)).get_error())
        except ValueError as error:  # NaN, half of a surrogate pair, or too many levels
            return str(error)

    schema = json.loads(structure.text)
    if refusal := refusal_of(schema, refuse):
        reason, keys = refusal
        raise StructureError(f"The JSON schema is not supported: {_short(reason)}", path_of(keys))
    return _automaton(vocabulary, _json(vocabulary, schema, structure.alternative))


def _source(vocabulary: Vocabulary, structure: Structure) -> str:
    """Return a structure in llguidance's form."""
    library, text = vocabulary.library.LLMatcher, structure.text
    if structure.kind == JSON_OBJECT:
        return _json(vocabulary, {"type": "object"}, structure.alternative)
    if structure.kind == REGEX:
        return str(library.grammar_from_regex(text))
    return str(library.grammar_from_lark(_choice(text) if structure.kind == CHOICE else text))


def _choice(text: str) -> str:
    return "start: " + " | ".join(map(json.dumps, json.loads(text)))


def _json(vocabulary: Vocabulary, schema: Any, alternative: str) -> str:
    """Return a schema in llguidance's form, or texts of another grammar."""
    if not alternative:
        return _schema(vocabulary, schema)
    styled = json.dumps({**_object(schema), "x-guidance": _JSON})
    rules = ("start: json | other", f"json: %json {styled}", f"other: %lark {{\n{alternative}\n}}")
    return str(vocabulary.library.LLMatcher.grammar_from_lark("\n".join(rules)))


def _object(schema: Any) -> Any:
    """Return a schema as an object."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    return schema


def _schema(vocabulary: Vocabulary, schema: Any) -> str:
    source: str = vocabulary.library.LLMatcher.grammar_from_json_schema(
        json.dumps(_object(schema)), overrides=_JSON
    )
    return source


def _automaton(vocabulary: Vocabulary, source: str) -> Any:
    limits = vocabulary.library.LLParserLimits(verbose_errors=False)
    return vocabulary.library.LLMatcher(vocabulary.lexicon, source, log_level=0, limits=limits)


def _short(reason: str) -> str:
    """Return a reason in one line."""
    line = " ".join(reason.split())
    return line if len(line) <= 200 else line[:200] + "…"
