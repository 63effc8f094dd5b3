"""The place in a JSON schema that the grammar compiler refuses.

llguidance reports what it refuses, but not where. So the schema is compiled again without each of
its parts: the place is the part whose removal changes the message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

Key = str | int
Refuse = Callable[[Any], str]
"""A function that returns why a schema is refused; empty if it is not."""

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


def _place(schema: Any, reason: str, refuse: Refuse) -> list[Key]:
    """Return the keys that lead to the last place that is refused for a reason."""
    path: list[Key] = []
    while True:
        part = _part_at(schema, path)
        children = [*_children(part)]

        def without(count: int) -> Any:
            return _replaced(schema, path, _neutral(part, children[:count]))  # noqa: B023

        count = _least(len(children), lambda count: refuse(without(count)) != reason)
        if count is None:
            break
        schema = without(count - 1)
        path += children[count - 1]
    if isinstance(part, dict):
        names = sorted(part, key="type".__eq__)  # without its type a schema allows almost all

        def left(count: int) -> Any:
            return _replaced(schema, path, {name: part[name] for name in names[count:]})

        count = _least(len(names), lambda count: refuse(left(count)) != reason)
        path += [] if count is None else names[count - 1 : count]
    return path


def _least(most: int, holds: Callable[[int], bool]) -> int | None:
    """Return the smallest count from 1 to `most` from which on `holds` is true, or None."""
    place = bisect_left(range(1, most + 1), True, key=holds)
    return place + 1 if place < most else None


def _neutral(schema: Any, children: list[tuple[Key, ...]]) -> Any:
    """Return a schema with neutral children, which hide no sibling as true in anyOf would."""
    if not children:
        return schema
    changed = schema.copy()
    for name, *keys in children:
        if not keys:
            changed[name] = True
            continue
        if changed[name] is schema[name]:
            changed[name] = schema[name].copy()
        changed[name][keys[0]] = {"const": keys} if name in ("anyOf", "oneOf") else True
    return changed


def _all(schema: Any) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """Yield all schemas within a schema, and the keys that lead to them."""
    waiting: list[tuple[tuple[Key, ...], Any]] = [((), schema)]
    while waiting:
        keys, part = waiting.pop()
        yield keys, part
        waiting += [((*keys, *more), _part_at(part, more)) for more in _children(part)]


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


def _part_at(schema: Any, keys: tuple[Key, ...] | list[Key]) -> Any:
    for key in keys:
        schema = schema[key]
    return schema


def _replaced(schema: Any, keys: list[Key], value: Any) -> Any:
    """Return a schema with another value at a place."""
    if not keys:
        return value
    changed = schema.copy()
    changed[keys[0]] = _replaced(schema[keys[0]], keys[1:], value)
    return changed
