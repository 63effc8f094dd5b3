"""The fields of bodies that give an answer a structure: OpenAI's, and vLLM's new and older ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tpcompile.errors import UsageError
from tpcompile.serving.structure import (
    CHOICE,
    GRAMMAR,
    JSON_OBJECT,
    JSON_SCHEMA,
    REGEX,
    Structure,
    StructureError,
)

FIELDS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""The fields of a body. At most one of them requests a structure."""
_KINDS = {
    "json": JSON_SCHEMA,
    "json_object": JSON_OBJECT,
    "regex": REGEX,
    "choice": CHOICE,
    "grammar": GRAMMAR,
}
"""The names of the kinds in `structured_outputs`, and after `guided_`."""


def take_structure(fields: dict[str, Any]) -> tuple[Structure | None, str]:
    """Remove the fields of structures; return the structure, and the path of its text.

    Raise StructureError with the path of a wrong value.
    """
    structures = [
        structure
        for name in FIELDS
        if name in fields and (structure := _structure(name, fields.pop(name)))
    ]
    if len(structures) > 1:
        paths = [path for _, path in structures]
        raise StructureError(
            f"A request must have at most one structure, got also {paths[0]}", paths[1]
        )
    return structures[0] if structures else (None, "")


def _structure(name: str, value: Any) -> tuple[Structure, str] | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return _structure_of(_KINDS[name.removeprefix("guided_")], value, name)


def _response_format(value: Any) -> tuple[Structure, str] | None:
    name = "response_format"
    form = _object(value, name, ("type", "json_schema"))
    kind = form.get("type")
    if kind not in ("text", JSON_OBJECT, JSON_SCHEMA):
        raise StructureError("The type must be text, json_object or json_schema", f"{name}.type")
    if kind != JSON_SCHEMA:
        return None if kind == "text" else (Structure(JSON_OBJECT), name)
    inner = f"{name}.{JSON_SCHEMA}"
    known = ("name", "description", "schema", "strict")
    described = _object(form.get(JSON_SCHEMA), inner, known)
    checks: Mapping[str, tuple[Callable[[Any], bool], str]] = {
        "name": (lambda text: isinstance(text, str) and bool(text), "a text that is not empty"),
        "description": (lambda text: text is None or isinstance(text, str), "a text"),
        "strict": (lambda flag: flag is None or isinstance(flag, bool), "true or false"),
        "schema": (lambda schema: isinstance(schema, (dict, bool)), "a JSON schema"),
    }
    for key, (fits, expected) in checks.items():
        if not fits(described.get(key)):
            raise StructureError(f"{key} must be {expected}", f"{inner}.{key}")
    return _structure_of(JSON_SCHEMA, described["schema"], f"{inner}.schema")


def _structured_outputs(value: Any) -> tuple[Structure, str] | None:
    name = "structured_outputs"
    kinds = _object(value, name, tuple(_KINDS))
    wanted = {kind: text for kind, text in kinds.items() if text not in (None, False)}
    if not wanted:
        return None
    if len(wanted) > 1:
        raise StructureError("There must be one kind of structure", f"{name}.{[*wanted][1]}")
    ((kind, text),) = wanted.items()
    return _structure_of(_KINDS[kind], text, f"{name}.{kind}")


def _structure_of(kind: str, value: Any, path: str) -> tuple[Structure, str]:
    """Return a structure, whose text may be JSON instead of a text."""
    if kind == JSON_OBJECT:
        if value is not True:
            raise StructureError("json_object must be true or false", path)
        return Structure(kind), path
    text = value if isinstance(value, str) and kind != CHOICE else None
    if text is None and kind in (JSON_SCHEMA, CHOICE):
        text = json.dumps(value)
    if text is None:
        raise StructureError("The structure must be a text", path)
    try:
        return Structure(kind, text), path
    except UsageError as error:
        raise StructureError(str(error), path) from error


def _object(value: Any, path: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Return an object that has only known keys."""
    if not isinstance(value, dict):
        raise StructureError(f"{path} must be an object", path)
    for key in value:
        if key not in known:
            raise StructureError(f"{str(key)[:60]!r} is not supported", f"{path}.{str(key)[:60]}")
    return value
