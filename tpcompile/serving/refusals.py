"""The place in a JSON schema that a compiler of grammars refuses.

llguidance says what it refuses, but not where. So schemas that lack parts of the refused one are
compiled: the part without which the message changes is the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Key = str | int
Refuse = Callable[[Any], str]
"""Returns why a schema is refused; empty if it is not."""

_SCHEMAS = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""The keywords whose value is a schema, a list of schemas, or has schemas by names."""


def refusal_of(schema: Any, refuse: Refuse) -> tuple[str, tuple[Key, ...]] | None:
    """Return why a schema is refused, and the keys that lead to the place; None if it is not."""
    for keys, part in _all(schema):
        if reason := _duplicates(part):
            return reason, (*keys, "minProperties")
    reason = refuse(schema)
    return (reason, tuple(_place(schema, reason, refuse))) if reason else None


def path_of(keys: tuple[Key, ...]) -> str:
    """Return keys as a path, such as `properties.a.anyOf[1].format`."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return "".join(parts).removeprefix(".")


def _duplicates(schema: Any) -> str:
    """Return why repeated names could satisfy `minProperties`; empty if they could not.

    Required names and those of other properties differ, but two other properties may be equal.
    """
    if not isinstance(schema, dict) or not isinstance(schema.get("minProperties"), int):
        return ""
    required = schema.get("required")
    known = len(set(map(str, required))) if isinstance(required, list) else 0
    if schema["minProperties"] <= known + 1:
        return ""
    return f"minProperties must be at most 1 more than the required names, which are {known}"


def _place(schema: Any, reason: str, refuse: Refuse) -> Iterator[Key]:
    """Yield the keys that lead to the first place that is refused for a reason."""
    root = schema
    path: list[Key] = []
    part = schema
    while True:
        for keys in _children(part):
            without = _replaced(root, (*path, *keys), _neutral(keys))
            if refuse(without) != reason:
                break
            root = without  # the same reason may hold elsewhere, too
        else:
            break
        path += keys
        yield from keys
        part = _at(root, path)
    if isinstance(part, dict):
        for key in sorted(part, key="type".__eq__):  # without its type a schema allows almost all
            without = _replaced(root, (*path, key), None)
            if refuse(without) != reason:
                yield key
                return
            root = without


def _neutral(keys: tuple[Key, ...]) -> Any:
    """Return a schema that hides no sibling: with true, the others of anyOf have no effect."""
    return {"const": [keys[1]]} if keys[0] in ("anyOf", "oneOf") else True


def _all(schema: Any) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """Yield all schemas within a schema, and the keys that lead to them."""
    waiting: list[tuple[tuple[Key, ...], Any]] = [((), schema)]
    while waiting:
        keys, part = waiting.pop()
        yield keys, part
        waiting += [((*keys, *more), _at(part, more)) for more in _children(part)]


def _children(schema: Any) -> Iterator[tuple[Key, ...]]:
    """Yield the keys of the schemas directly within a schema; definitions come first."""
    if not isinstance(schema, dict):
        return
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            yield from ((name, key) for key in schema[name])
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            yield from ((name, place) for place in range(len(schema[name])))
    for name in _SCHEMAS:
        if isinstance(schema.get(name), (dict, bool)):
            yield (name,)


def _at(schema: Any, keys: tuple[Key, ...] | list[Key]) -> Any:
    for key in keys:
        schema = schema[key]
    return schema


def _replaced(schema: Any, keys: tuple[Key, ...], value: Any) -> Any:
    """Return a schema with another value at a place; without it if the value is None."""
    key, *rest = keys
    changed = schema.copy()
    if rest:
        changed[key] = _replaced(schema[key], tuple(rest), value)
    elif value is None:
        del changed[key]
    else:
        changed[key] = value
    return changed
