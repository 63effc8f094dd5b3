"""The names in an instruction's rules: operands, and free names that buffer shapes bind."""

from __future__ import annotations

import math
from functools import cache
from operator import attrgetter
from typing import Any

from tpcompile.errors import UnsupportedError
from tpcompile.vm.program.fields import flat_fields
from tpcompile.vm.program.rules import PROGRAM_RANKS


class Names:
    """Values by path, such as `normed.width`.

    For an operand in a nested dataclass, `prefix` is the path of that dataclass. Names inside it
    take precedence over outer names.
    """

    def __init__(self, operands: Any, ranks: int) -> None:
        self._values: dict[str, Any] = {PROGRAM_RANKS: ranks, **_values_of(operands)}

    def __getitem__(self, path: str) -> Any:
        return self._values[path]

    def update(self, bound: dict[str, int]) -> None:
        self._values.update(bound)

    def number(self, expression: str, prefix: str = "") -> int:
        """Return the value of an expression whose names are all bound."""
        total = 0
        for sign, factors in terms_of(expression):
            for factor in factors:
                sign *= self._value(factor, prefix, self._values)
            total += sign
        return total

    def bind(self, extent: int, expression: str, prefix: str, bound: dict[str, int]) -> bool:
        """Return whether an extent equals this product. Bind a free name in it to the quotient."""
        product, free = 1, ""
        ((_, factors),) = terms_of(expression)
        for factor in factors:
            value = self._value(factor, prefix, self._values, bound)
            if value is None:
                if free:
                    raise UnsupportedError(
                        f"The rule {expression!r} has two free names",
                        got=f"{free} and {factor}",
                        expected="at most one free name per dimension",
                    )
                free = factor
            else:
                product *= value
        if not free:
            return extent == product
        bound[free], remainder = divmod(extent, product)
        return not remainder and bound[free] > 0

    def shown(self, expression: str, prefix: str) -> str:
        """Format a product, with its value if all names are bound."""
        ((_, factors),) = terms_of(expression)
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
def terms_of(expression: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Split an expression such as `"rows - heads*width"` into products with their signs."""
    first, *subtracted = expression.split(" - ")
    return (
        (1, tuple(first.split("*"))),
        *((-1, tuple(product.split("*"))) for product in subtracted),
    )


def _values_of(operands: Any) -> dict[str, Any]:
    kind: Any = type(operands)
    return {path: attrgetter(path)(operands) for path, _ in flat_fields(kind)}
