"""The names in an instruction's rules: its operands, and those that buffers give values to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from tpcompile.vm.program.instruction import field_types
from tpcompile.vm.program.rules import PROGRAM_RANKS


class Names:
    """Values by path, as `normed.width`.

    In a dataclass inside of another, the prefix, its own names come before those outside.
    """

    def __init__(self, at: Any, ranks: int) -> None:
        self._values: dict[str, Any] = {PROGRAM_RANKS: ranks, **dict(_flat(at))}

    def __getitem__(self, path: str) -> Any:
        return self._values[path]

    def update(self, bound: dict[str, int]) -> None:
        self._values.update(bound)

    def number(self, expression: str, prefix: str = "") -> int:
        """The value of an expression whose names all have one."""
        found = 0
        for sign, factors in _terms(expression):
            for factor in factors:
                sign *= self._value(factor, prefix, self._values)
            found += sign
        return found

    def bind(self, extent: int, expression: str, prefix: str, bound: dict[str, int]) -> bool:
        """Whether an extent is this product; a free name in it is bound to the quotient."""
        product, free = 1, ""
        ((_, factors),) = _terms(expression)
        for factor in factors:
            value = self._value(factor, prefix, self._values, bound)
            if value is None:
                free = factor
            else:
                product *= value
        if not free:
            return extent == product
        bound[free], rest = divmod(extent, product)
        return not rest and bound[free] > 0

    def shown(self, expression: str, prefix: str) -> str:
        """A product with its value, where it has one."""
        ((_, factors),) = _terms(expression)
        values = [self._value(factor, prefix, self._values) for factor in factors]
        if None in values or expression.isdigit():
            return expression
        return f"{expression}={math.prod(values)}"

    def _value(self, factor: str, prefix: str, *names: dict[str, Any]) -> Any:
        if factor.isdigit():
            return int(factor)
        for known in names:
            if prefix and prefix + factor in known:
                return known[prefix + factor]
            if factor in known:
                return known[factor]
        return None


@cache
def _terms(expression: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Products with their signs: `"rows - heads*width"`."""
    first, *rest = expression.split(" - ")
    return ((1, tuple(first.split("*"))), *((-1, tuple(one.split("*"))) for one in rest))


def _flat(at: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    kind: Any = type(at)
    for name, inner in field_types(kind):
        if is_dataclass(inner):
            yield from _flat(getattr(at, name), f"{prefix}{name}.")
        else:
            yield prefix + name, getattr(at, name)
