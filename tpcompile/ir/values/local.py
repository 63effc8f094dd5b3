"""The expression of a single call over the names of its operands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tpcompile.ir.meta import type_of
from tpcompile.ir.ops import RuleError, spec_of
from tpcompile.ir.types import SymbolType, ValueType
from tpcompile.ir.values.expressions import Expressions, UnprovedError
from tpcompile.ir.values.shown import shown
from tpcompile.ir.values.value import OpaqueError, Value

_DEEP = 1000
"""A depth above that of any expression of one call."""


@dataclass
class LocalExpressions:
    """Expressions of single nodes as text; operands are named, and parameters are opened."""

    _table: Expressions = field(default_factory=Expressions)

    def of(self, node: fx.Node) -> list[str]:
        """Return the expression of each result of a node; [] if it has no expression."""
        try:
            value = self._value(node)
        except (OpaqueError, UnprovedError, RuleError):
            return []
        results = value if isinstance(value, tuple) else (value,)
        return [shown(output.body, _DEEP) for output in results if isinstance(output, Value)]

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._operand(node)
        spec = spec_of(node)
        if spec is None:
            return ()
        bound = spec.bind(self._arguments(node.args), self._arguments(node.kwargs))
        return self._table.result(spec.target, *bound.values())

    def _arguments(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self._operand(arg)
        if isinstance(arg, list | tuple):
            return tuple(self._arguments(item) for item in arg)
        if isinstance(arg, dict):
            return {key: self._arguments(item) for key, item in arg.items()}
        return arg

    def _operand(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._table.parameter(node)
        kind = type_of(node)
        if isinstance(kind, tuple):
            return tuple(self._named(f"{node.name}.{n}", member) for n, member in enumerate(kind))
        return self._named(node.name, kind)

    def _named(self, name: str, kind: ValueType | SymbolType) -> Any:
        return self._table.input(name, kind) if isinstance(kind, ValueType) else kind.symbol
