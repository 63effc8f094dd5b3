"""Values of parameters that models write as text, by the JSON schema of their function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def is_text(parameters: Any, name: str) -> bool:
    """Return whether the text of a parameter is its value, and not JSON."""
    return not _types(parameters, name) - {"string"}


def json_of(parameters: Any, name: str, text: str) -> str:
    """Return a value as JSON: unchanged if it has a type of its schema, else as a string."""
    types = _types(parameters, name) - {"string"}
    spelled = text.strip()
    if "boolean" in types and spelled.lower() in ("true", "false"):
        return spelled.lower()
    try:
        value = json.loads(spelled, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return string_of(text)
    return spelled if any(_is(value, kind) for kind in types) else string_of(text)


def string_of(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _is(value: Any, kind: str) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _types(parameters: Any, name: str) -> set[str]:
    """Return the types that a parameter may have; none if its schema does not specify any."""
    if not isinstance(parameters, Mapping):
        return set()
    types: set[str] = set()
    references: set[str] = set()
    alternatives = [schemas(parameters).get(name, parameters.get("additionalProperties"))]
    while alternatives:
        schema = alternatives.pop()
        if not isinstance(schema, Mapping):
            continue
        types |= _own_types(schema)
        for key in ("anyOf", "oneOf", "allOf"):
            alternatives += _listed(schema.get(key))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            alternatives.append(_referred(reference, parameters))
    return types


def schemas(parameters: Any) -> Mapping[str, Any]:
    """Return the schemas of parameters by their names."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names, or those of its values."""
    named = schema.get("type")
    types = {kind for kind in ("string", *_KINDS) if kind in (named, *_listed(named))}
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not types:
        for value in values:
            types.add(next((kind for kind in _KINDS if _is(value, kind)), "string"))
    return types


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Any) -> Any:
    """Return the part of a schema that a reference such as `#/$defs/Place` names."""
    if not reference.startswith("#"):
        return None
    for key in reference[1:].split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")
