"""Random JSON schemas, as people write them for answers of a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_NAMES = (
    "id",
    "name",
    "city",
    "tags",
    "price",
    "unit",
    "when",
    "items",
    "next",
    "kind",
    "a b",
    "ä",
)
_WORDS = ("red", "green", "blue", "north", "1.5", 'say "hi"', "ü", "", "none")
_PATTERNS = ("^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{4}$", "^(cat|dog)s?$", "[0-9]{1,3}", "^v[0-9]+$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "duration")
_REFUSED: tuple[tuple[str, Any], ...] = (
    ("not", {"type": "null"}),
    ("uniqueItems", True),
    ("contains", {"type": "integer"}),
    ("propertyNames", {"maxLength": 3}),
    ("dependentRequired", {"a": ["b"]}),
    ("format", "phone-number"),
    ("pattern", "(?=a)b"),
    ("unevaluatedProperties", False),
    ("minProperties", 5),
)
"""Keywords that are not supported, with a value each."""

_DEEPEST = 3
"""The depth at which no further objects and arrays are drawn."""


class Schemas:
    """A source of schemas, by a seed."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._defined: dict[str, Any] = {}

    def draw(self) -> Any:
        """Return a schema that is supported."""
        self._defined = {}
        schema = self._dice.choice((self._object, self._object, self._object, self._any))(0)
        return schema | {"$defs": self._defined} if self._defined else schema

    def refused(self) -> tuple[Any, tuple[str | int, ...]]:
        """Return a schema that is not supported, and the keys that lead to the place."""
        keyword, value = self._dice.choice(_REFUSED)
        kind = "string" if keyword in ("format", "pattern") else None
        kind = "object" if keyword == "minProperties" else kind
        part = {"type": kind, keyword: value} if kind else {keyword: value}
        keys: tuple[str | int, ...] = (keyword,)
        for _ in range(self._dice.randint(0, 3)):
            part, step = self._dice.choice(self._around(part))
            keys = (*step, *keys)
        if self._dice.random() < 0.3:
            return {"$ref": "#/$defs/x", "$defs": {"x": part}}, ("$defs", "x", *keys)
        return part, keys

    def _around(self, part: Any) -> list[tuple[Any, tuple[str | int, ...]]]:
        name, other = self._dice.choice(_NAMES), self._dice.choice(("left", "right"))
        object_of = {"type": "object", "properties": {other: self._any(_DEEPEST), name: part}}
        any_of = {"anyOf": [{"type": "integer"}, part]}
        return [
            (object_of, ("properties", name)),
            ({"type": "array", "items": part}, ("items",)),
            (any_of, ("anyOf", 1)),
        ]

    def _any(self, depth: int) -> Any:
        leaves = (self._string, self._string, self._integer, self._number, self._enum, self._simple)
        inner = (self._object, self._object, self._array, self._any_of, self._reference)
        kinds: tuple[Callable[[int], Any], ...] = leaves if depth >= _DEEPEST else leaves + inner
        return self._dice.choice(kinds)(depth)

    def _string(self, depth: int) -> Any:
        dice, schema = self._dice, {"type": "string"}
        kind = dice.randrange(5)
        if kind == 0:
            return schema | {"pattern": dice.choice(_PATTERNS)}
        if kind == 1:
            return schema | {"format": dice.choice(_FORMATS)}
        if kind == 2:
            return schema
        least = dice.choice((0, 0, 1, 3))
        return schema | {"minLength": least, "maxLength": least + dice.randrange(20)}

    def _integer(self, depth: int) -> Any:
        dice, schema = self._dice, {"type": "integer"}
        least = dice.randint(-100, 100)
        bounds = (
            {},
            {"minimum": least},
            {"maximum": least},
            {"minimum": least, "exclusiveMaximum": least + dice.randint(2, 1000)},
            {"multipleOf": dice.choice((2, 5, 10)), "minimum": 0, "maximum": 1000},
        )
        return schema | dice.choice(bounds)

    def _number(self, depth: int) -> Any:
        dice, least = self._dice, self._dice.randint(-40, 40) / 4
        bounds = ({}, {"minimum": least, "maximum": least + 2.5}, {"exclusiveMinimum": least})
        return {"type": "number"} | dice.choice(bounds)

    def _enum(self, depth: int) -> Any:
        values = [*_WORDS, 1, -2.5, True, None, [1, "a"], {"a": 1}]
        if self._dice.random() < 0.3:
            return {"const": self._dice.choice(values)}
        return {"enum": self._dice.sample(values, self._dice.randint(1, 5))}

    def _simple(self, depth: int) -> Any:
        kinds = ["null", "boolean", "integer"]
        return {"type": self._dice.choice((*kinds, ["integer", "null"], ["string", "boolean"]))}

    def _object(self, depth: int) -> Any:
        dice, schema = self._dice, dict[str, Any](type="object")
        names = dice.sample(_NAMES, dice.randint(1, 5))
        schema["properties"] = {name: self._any(depth + 1) for name in names}
        schema["required"] = [name for name in names if dice.random() < 0.7]
        extra = dice.random()
        if extra < 0.7:
            schema["additionalProperties"] = False
        elif extra < 0.8:
            schema["additionalProperties"] = {"type": "integer"}
        elif extra < 0.9:
            schema |= {"patternProperties": {"^x-[a-z]$": {"type": "boolean"}}}
            schema["additionalProperties"] = False
        return schema

    def _array(self, depth: int) -> Any:
        dice, schema = self._dice, dict[str, Any](type="array")
        if dice.random() < 0.2:
            schema["prefixItems"] = [self._any(depth + 1) for _ in range(dice.randint(1, 3))]
            return schema | {"items": False}
        schema["items"] = self._any(depth + 1)
        if dice.random() < 0.5:
            least = dice.randrange(3)
            schema |= {"minItems": least, "maxItems": least + dice.randrange(4)}
        return schema

    def _any_of(self, depth: int) -> Any:
        dice = self._dice
        if dice.random() < 0.2:
            tags = dice.sample(("circle", "square", "line"), 2)
            return {"oneOf": [self._tagged(tag, depth + 1) for tag in tags]}
        if dice.random() < 0.2:
            return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}
        return {"anyOf": [self._any(depth + 1) for _ in range(dice.randint(2, 3))]}

    def _tagged(self, tag: str, depth: int) -> Any:
        properties = {"tag": {"const": tag}, "value": self._any(depth)}
        required = ["tag", "value"]
        return {"type": "object", "properties": properties, "required": required}

    def _reference(self, depth: int) -> Any:
        name = f"part{len(self._defined)}"
        self._defined[name] = True  # its place, in the order of names
        if self._dice.random() < 0.3:
            link = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
            properties = {"value": self._any(depth + 1), "next": link}
            required = ["value", "next"]
            part = {"type": "object", "properties": properties, "required": required}
            self._defined[name] = part | {"additionalProperties": False}
        else:
            self._defined[name] = self._any(depth + 1)
        return {"$ref": f"#/$defs/{name}"}
