"""The expressions of a graph's values, over checkpoint tensors and inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tpcompile.ir.meta import parameter_of, type_of
from tpcompile.ir.ops import SPECS, OpSpec, RuleError, op_name, spec_of
from tpcompile.ir.ops.composite import Part
from tpcompile.ir.types import AnyType, ValueType
from tpcompile.ir.values.build import called
from tpcompile.ir.values.parameters import parameter_value
from tpcompile.ir.values.scope import Kept, Scope
from tpcompile.ir.values.term import Term, Terms
from tpcompile.ir.values.value import OpaqueError, Value, coordinates


@dataclass(frozen=True)
class GraphValues:
    """The values of a graph: those of its nodes, its results, and the states that it leaves."""

    nodes: dict[fx.Node, Any]
    outputs: tuple[Value, ...]
    states: dict[tuple[Term, int], Kept]


@dataclass
class Expressions:
    """A table of expressions, which graphs share: a call of known operands is read only once."""

    terms: Terms = field(default_factory=Terms)
    _calls: dict[Any, Any] = field(default_factory=dict)
    _parameters: dict[int, tuple[Any, Value]] = field(default_factory=dict)

    def of(self, gm: fx.GraphModule) -> GraphValues:
        """Return the values of a graph whose nodes have types."""
        scope = Scope(self.terms, lambda target, args: self._interpret(scope, target, args))
        values: dict[fx.Node, Any] = {}
        outputs: tuple[Value, ...] = ()
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._input(node)
            elif node.op == "get_attr":
                values[node] = self._parameter(node)
            elif node.op == "output":
                results = _arguments(node.args[0], values)
                outputs = results if isinstance(results, tuple) else (results,)
            else:
                values[node] = self._call(scope, node, values)
        return GraphValues(values, outputs, scope.states)

    def _input(self, node: fx.Node) -> Value:
        kind = type_of(node)
        assert isinstance(kind, ValueType)
        source = self.terms.source("input", (node.name, kind.format), kind.dtype)
        return _whole(self.terms, source, kind)

    def _parameter(self, node: fx.Node) -> Value:
        parameter = parameter_of(node)
        known = self._parameters.get(id(parameter))
        if known is None:
            value = parameter_value(self.terms, parameter.whole, parameter.type.dtype)
            known = self._parameters[id(parameter)] = parameter, value
        return known[1]

    def _call(self, scope: Scope, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args = _arguments(node.args, values)
        kwargs = {name: _arguments(arg, values) for name, arg in node.kwargs.items()}
        key = (node.target, _keyed(args), _keyed(tuple(kwargs.items())))
        known = self._calls.get(key)
        if known is not None:
            return known
        spec = spec_of(node)
        if spec is None:
            raise UnprovedError(f"{op_name(node)} is no op of the dialect", node)
        scope.touched = False
        bound = spec.bind(args, kwargs)
        try:
            result = self._apply(scope, spec, bound)
        except OpaqueError:
            result = self._opaque(spec, bound, type_of(node), node)
        if not scope.touched:
            self._calls[key] = result
        return result

    def _interpret(self, scope: Scope, target: Any, args: tuple[Any, ...]) -> Any:
        """Return the value of a call within a body."""
        if isinstance(target, Part):
            if target.value is None:
                raise OpaqueError("a function without a rule")
            return target.value(scope, *args)
        spec = SPECS[target]
        bound = spec.bind(args, {})
        if spec.value is not None:
            return self._apply(scope, spec, bound)
        try:
            kind = spec.rule(**{name: _plain_type(arg) for name, arg in bound.items()})
        except RuleError as error:
            raise OpaqueError(str(error)) from error
        return self._opaque(spec, bound, kind, None)

    def _apply(self, scope: Scope, spec: OpSpec, bound: dict[str, Any]) -> Any:
        if spec.value is None:
            raise OpaqueError("no rule")
        return spec.value(scope, **bound)

    def _opaque(
        self, spec: OpSpec, bound: dict[str, Any], kind: AnyType, node: fx.Node | None
    ) -> Any:
        """Return the results of an op of which only its operands are known."""
        schema = getattr(spec.target, "_schema", None)
        if schema is not None and schema.is_mutable and spec.name not in _WRITES:
            raise UnprovedError(f"{spec.name} overwrites an operand and has no rule", node)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not all(isinstance(each, ValueType) for each in kinds):
            raise UnprovedError(f"{spec.name} has no rule for a number", node)
        results = [(each.shape, each.dtype) for each in kinds if isinstance(each, ValueType)]
        found = called(self.terms, spec.name, bound, *results)
        return found if isinstance(kind, tuple) else found[0]


class UnprovedError(Exception):
    """A call whose value has no expression, so nothing can be proved of the graph."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.node = node


_WRITES = frozenset({"aten.div_"})
"""Ops that overwrite an operand which no other node reads."""


def _whole(terms: Terms, source: Term, kind: ValueType) -> Value:
    indices = coordinates(kind.shape)
    own = (index for index, extent in zip(indices, kind.shape, strict=True) if extent != 1)
    return Value(kind.shape, kind.dtype, terms.read(source, tuple(own)))


def _arguments(arg: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(arg, fx.Node):
        return values[arg]
    if isinstance(arg, list | tuple):
        return tuple(_arguments(item, values) for item in arg)
    return arg


def _keyed(arg: Any) -> Any:
    """Return a key of an argument; 1, 1.0 and True differ."""
    if isinstance(arg, Value):
        return arg
    if isinstance(arg, tuple):
        return tuple(map(_keyed, arg))
    return type(arg), arg


def _plain_type(arg: Any) -> Any:
    if isinstance(arg, Value):
        return ValueType(arg.shape, arg.dtype)
    if isinstance(arg, tuple):
        return tuple(map(_plain_type, arg))
    return arg
