"""JSON schemas of any size, each with an instance: records of fields of all kinds."""

from __future__ import annotations

import json
from typing import Any

_FIELDS: tuple[tuple[dict[str, Any], Any], ...] = (
    ({"type": "string"}, "The grey cat of Anna sleeps at the window."),
    ({"type": "integer", "minimum": 0, "maximum": 150}, 42),
    ({"type": "number"}, -17.25),
    ({"enum": ["celsius", "fahrenheit", "kelvin"]}, "kelvin"),
    ({"type": "string", "format": "date-time"}, "2026-01-31T12:30:00Z"),
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, "QA-2026"),
    ({"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 8}, ["a", "bc"]),
    ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, None),
    ({"$ref": "#/$defs/place"}, {"city": "Basel", "population": 177_000}),
)
_PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


def record(size: int) -> tuple[str, str]:
    """Return a schema of about so many bytes, and an instance of it."""
    properties: dict[str, Any] = {}
    instance: dict[str, Any] = {}
    while not properties or len(_schema(properties)) < size:
        place = len(properties)
        field, value = _FIELDS[place % len(_FIELDS)]
        name = f"field_{place}"
        properties[name] = field | {"description": f"The value number {place} of the record"}
        instance[name] = value
    return _schema(properties), json.dumps(instance)


def _schema(properties: dict[str, Any]) -> str:
    return json.dumps(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
            "$defs": {"place": _PLACE},
        }
    )
