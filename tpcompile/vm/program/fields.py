"""The fields of instructions and of their operands, with their types and rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, get_type_hints


class Named(NamedTuple):
    """A rule with the path of its operand."""

    path: str
    prefix: str
    """The path of the enclosing dataclass, whose names take precedence over outer names."""
    rule: Any


@cache
def field_types(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a dataclass with their types, in order."""
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


@cache
def own_types(kind: Any) -> Mapping[str, Any]:
    """Return the types of the operands that each instruction of this kind has for itself."""
    return {name: inner for name, inner in field_types(kind) if name != "at"}


def operands_of(kind: Any) -> Any:
    """Return the class of the operands that instructions of this kind share."""
    return dict(field_types(kind))["at"]


@cache
def flat_fields(kind: Any) -> tuple[tuple[str, type], ...]:
    """Return the fields of a dataclass in order; a nested field is named `outer.inner`."""
    flat: list[tuple[str, type]] = []
    for name, inner in field_types(kind):
        if has_fields(inner):
            flat += [(f"{name}.{deeper}", last) for deeper, last in flat_fields(inner)]
        else:
            flat.append((name, inner))
    return tuple(flat)


def has_fields(kind: Any) -> bool:
    """Return whether a type or a value is a dataclass."""
    return is_dataclass(kind)


@cache
def field_rules(kind: Any) -> Mapping[str, Any]:
    """Return the rule in the `Annotated` type of each field that has one."""
    hints = get_type_hints(kind, include_extras=True)
    metadata = {
        field.name: getattr(hints[field.name], "__metadata__", ()) for field in fields(kind)
    }
    return {name: extras[0] for name, extras in metadata.items() if extras}


@cache
def rules_of(kind: Any) -> tuple[Named, ...]:
    """Return the rules of all operands of instructions of this kind; shared ones have `at.`."""
    shared = [named._replace(path=f"at.{named.path}") for named in shared_rules(kind)]
    own_rules = [Named(name, "", rule) for name, rule in field_rules(kind).items() if name != "at"]
    return (*shared, *own_rules)


@cache
def shared_rules(kind: Any) -> tuple[Named, ...]:
    """Return the rules of the operands that instructions of this kind share."""
    return tuple(_nested(operands_of(kind), "", field_rules(kind).get("at", {})))


def _nested(kind: Any, prefix: str, instead: Any) -> Iterator[Named]:
    rules = {**field_rules(kind), **instead}
    for name, inner in field_types(kind):
        if has_fields(inner):
            yield from _nested(inner, f"{prefix}{name}.", {})
        elif name in rules:
            yield Named(prefix + name, prefix, rules[name])
