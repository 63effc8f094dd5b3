"""The structure of an answer: a form that its text must have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tpcompile.errors import UsageError

JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, GRAMMAR = KINDS = (
    *("json_object", "json_schema", "regex", "choice", "grammar"),
)
JSON_KINDS = (JSON_OBJECT, JSON_SCHEMA)


class StructureError(UsageError):
    """A structure that is wrong or not supported."""

    def __init__(self, reason: str, path: str = "") -> None:
        """`path` is the place in a JSON schema, as `properties.a.format`."""
        super().__init__(reason, where=path)
        self.reason, self.path = reason, path


@dataclass(frozen=True)
class Structure:
    """A form that the text of a continuation must have."""

    kind: str
    """The kind of form, a member of `KINDS`."""
    text: str = ""
    """The JSON schema, the regular expression, a JSON list of the texts to choose from, or the
    grammar in llguidance's form of Lark; empty for "json_object"."""
    after: str = ""
    """A text such as "</think>": the text before it and whitespace after it are free. If it is
    empty, the whole continuation has the form."""
    alternative: str = ""
    """For "json_object" and "json_schema": a grammar whose texts are allowed instead of JSON."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(
                "The kind of a structure must be one of " + ", ".join(KINDS), got=repr(self.kind)
            )
        for name in ("text", "after", "alternative"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(
                    f"{name} of a structure must be a text", got=repr(getattr(self, name))
                )
        if self.alternative and self.kind not in JSON_KINDS:
            raise UsageError(
                f"A structure of kind {self.kind} must not have an alternative",
                hint="Its kind must be " + " or ".join(JSON_KINDS),
            )
        if (self.kind == JSON_OBJECT) != (not self.text):
            needed = "must be empty" if self.kind == JSON_OBJECT else "must not be empty"
            raise UsageError(f"The text of a structure of kind {self.kind} {needed}")
        if self.kind == JSON_SCHEMA and not isinstance(_parsed(self), (dict, bool)):
            raise UsageError("A JSON schema must be an object, true or false", got=self.text[:60])
        if self.kind == CHOICE:
            texts = _parsed(self)
            listed = isinstance(texts, list) and bool(texts)
            if not listed or any(not isinstance(text, str) or not text for text in texts):
                raise UsageError(
                    "A choice must be a JSON list of texts that are not empty", got=self.text[:60]
                )


def _parsed(structure: Structure) -> Any:
    try:
        return json.loads(structure.text)
    except (ValueError, RecursionError) as error:
        noun = "schema" if structure.kind == JSON_SCHEMA else "choice"
        raise UsageError(f"A {noun} must be JSON: {error}", got=structure.text[:60]) from error
