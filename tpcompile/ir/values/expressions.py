"""The expressions of a graph's values, over checkpoint tensors and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from torch import fx

from tpcompile.ir.meta import captured_value, parameter_of, type_of
from tpcompile.ir.ops import SPECS, OpSpec, RuleError, op_name, spec_of
from tpcompile.ir.ops.composite import Part
from tpcompile.ir.types import AnyType, ValueType
from tpcompile.ir.values.build import called
from tpcompile.ir.values.node import Term
from tpcompile.ir.values.parameters import parameter_value
from tpcompile.ir.values.scope import Event, LayerState, Rewrite, Scope
from tpcompile.ir.values.term import Terms
from tpcompile.ir.values.value import OpaqueError, Value, own_indices

_NONE: frozenset[Rewrite] = frozenset()
_CALLS = ("call_function", "call_module", "call_method")
_SEQUENCES = (list, tuple)


@dataclass(frozen=True)
class GraphValues:
    """The values of a graph: those of its nodes, its results, and the states that it leaves.

    `left_out` has the calls that rewrites have replaced.
    """

    nodes: dict[fx.Node, Any]
    names: dict[fx.Node, str]
    """The node of the captured graph that each node stands for."""
    outputs: tuple[Value, ...]
    states: dict[tuple[Term, int], LayerState]
    left_out: frozenset[Term]


def called_values(values: GraphValues, until: fx.Node | None = None) -> dict[str, Value]:
    """Return the values of calls by name, up to a node if one is passed."""
    earlier = takewhile(lambda item: item[0] is not until, values.nodes.items())
    return {
        node.name: value
        for node, value in earlier
        if node.op.startswith("call") and isinstance(value, Value)
    }


class _Call(NamedTuple):
    """A call, and the events of its rule."""

    target: Any
    args: Any
    kwargs: Any
    events: list[Event]

    def is_same(self, node: fx.Node, changed: set[fx.Node]) -> bool:
        """Return whether a node still makes the call, and none of its operands has changed."""
        return (
            self.args is node.args
            and self.kwargs is node.kwargs
            and self.target is node.target
            and node.op in _CALLS
            and (not changed or changed.isdisjoint(node.all_input_nodes))
        )


@dataclass
class Expressions:
    """A table of expressions, which graphs share: a call of known operands is read only once."""

    terms: Terms = field(default_factory=Terms)
    _calls: dict[Any, list[tuple[Any, list[Event]]]] = field(default_factory=dict)
    """The values of each call, with the events of its rule."""
    _last: dict[fx.Node, Any] = field(default_factory=dict)
    """The values of the graph that was read last."""
    _last_calls: dict[fx.Node, _Call] = field(default_factory=dict)
    """The calls of that graph."""
    _inputs: dict[Any, Value] = field(default_factory=dict)
    _parameters: dict[Any, tuple[Any, Value]] = field(default_factory=dict)

    def of(self, gm: fx.GraphModule, rewrites: frozenset[Rewrite] = _NONE) -> GraphValues:
        """Return the values of a graph whose nodes have types, under these rewrites."""
        scope = self._scope(rewrites)
        values: dict[fx.Node, Any] = {}
        calls: dict[fx.Node, _Call] = {}
        changed: set[fx.Node] = set()
        outputs: tuple[Value, ...] = ()
        for node in gm.graph.nodes:
            call = self._last_calls.get(node)
            if call is not None and call.is_same(node, changed):
                scope.events = []
                if not call.events or scope.replay(call.events):
                    calls[node], values[node] = call, self._last[node]
                    continue
            if node.op == "output":
                results = _arguments(node.args[0], values)
                outputs = results if isinstance(results, tuple) else (results,)
                continue
            scope.events = []
            values[node] = value = self._value(scope, node, values)
            if self._last.get(node, value) is not value:
                changed.add(node)
            if node.op in _CALLS:
                calls[node] = _Call(node.target, node.args, node.kwargs, scope.events)
        self._last, self._last_calls = values, calls
        names = {node: name for node in values if (name := captured_value(node)) is not None}
        return GraphValues(values, names, outputs, scope.states, frozenset(scope.left_out))

    def _scope(self, rewrites: frozenset[Rewrite] = _NONE) -> Scope:
        scope = Scope(self.terms, lambda *call: self._interpret(scope, *call), rewrites)
        return scope

    def mistakes(
        self, gm: fx.GraphModule, expected: Mapping[fx.Node, Value], rewrites: frozenset[Rewrite]
    ) -> Iterator[tuple[fx.Node, Value, Value]]:
        """Yield each node whose value is wrong although its operands are right.

        Both values are yielded too. A value that only depends on a mistake is not a mistake.
        """
        scope = self._scope(rewrites)
        values: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                continue
            scope.events = []
            values[node] = value = self._value(scope, node, values)
            wanted = expected.get(node)
            if wanted is not None and value.body is not wanted.body:
                yield node, wanted, value
                if wanted.shape == value.shape:
                    values[node] = wanted

    def result(self, target: Any, *args: Any) -> Value:
        """Return the value of a call of operands that a graph has."""
        value: Value = self._interpret(self._scope(), target, args)
        return value

    def rewrites_at(self, node: fx.Node) -> tuple[Rewrite, ...]:
        """Return the rewrites that the value of a call uses, as it was read last."""
        events = self._last_calls[node].events if node in self._last_calls else []
        return tuple(dict.fromkeys(e.subject for e in events if e.kind == "allows" and e.answer))

    def _value(self, scope: Scope, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "placeholder":
            kind = type_of(node)
            assert isinstance(kind, ValueType)
            scope.inputs[node.name] = value = self.input(node.name, kind)
            return value
        if node.op == "get_attr":
            return self.parameter(node)
        args = _arguments(node.args, values)
        kwargs = {name: _arguments(arg, values) for name, arg in node.kwargs.items()}
        spec = spec_of(node)
        if spec is None:
            raise UnprovedError(f"{op_name(node)} is not an op of the dialect", node)
        return self._once(scope, spec, args, kwargs, node)

    def input(self, name: str, kind: ValueType) -> Value:
        """Return an input of a graph; only its name and type are known."""
        key = name, kind.shape, kind.dtype, kind.format
        if key not in self._inputs:
            source = self.terms.source("input", (name, kind.format), kind.dtype)
            body = self.terms.read(source, own_indices(kind.shape))
            self._inputs[key] = Value(kind.shape, kind.dtype, body)
        return self._inputs[key]

    def parameter(self, node: fx.Node) -> Value:
        """Return the value of a parameter."""
        parameter = parameter_of(node)
        key = id(parameter.whole), parameter.type.dtype
        known = self._parameters.get(key)
        if known is None:
            value = parameter_value(self.terms, parameter.whole, parameter.type.dtype)
            known = self._parameters[key] = parameter.whole, value
        return known[1]

    def _interpret(self, scope: Scope, target: Any, args: tuple[Any, ...]) -> Any:
        """Return the value of a call within a body."""
        if isinstance(target, Part):
            if target.value is None:
                raise OpaqueError("a function without a rule")
            return target.value(scope, *args)
        return self._once(scope, SPECS[target], args, {}, None)

    def _once(
        self,
        scope: Scope,
        spec: OpSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        node: fx.Node | None,
    ) -> Any:
        """Return the value of a call, from the table if a call with the same operands was read."""
        key: Any = (spec.target, *map(_keyed, args), *kwargs, *map(_keyed, kwargs.values()))
        known = self._calls.setdefault(key, [])
        for result, events in known:
            if not events or scope.replay(events):
                return result
        bound = spec.bind(args, kwargs)
        outer, scope.events = scope.events, []
        try:
            if spec.value is None:
                raise OpaqueError("no rule")
            result = spec.value(scope, **bound)
        except OpaqueError:
            result = self._opaque(spec, bound, node)
        known.append((result, scope.events))
        scope.events = [*outer, *scope.events]
        return result

    def _opaque(self, spec: OpSpec, bound: dict[str, Any], node: fx.Node | None) -> Any:
        """Return opaque results of an op: they depend on its operands alone."""
        schema = getattr(spec.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise UnprovedError(f"{spec.name} overwrites an operand, and has no rule", node)
        kind = _plain_result(spec, bound) if node is None else type_of(node)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        results = [(item.shape, item.dtype) for item in kinds if isinstance(item, ValueType)]
        if len(results) < len(kinds):
            raise UnprovedError(f"{spec.name} computes a number, and has no rule", node)
        values = called(self.terms, spec.name, bound, *results)
        return values if isinstance(kind, tuple) else values[0]


def _plain_result(spec: OpSpec, bound: dict[str, Any]) -> AnyType:
    """Return the type of the result of a call within a body."""
    try:
        return spec.rule(**{name: _plain_type(arg) for name, arg in bound.items()})
    except RuleError as error:
        raise OpaqueError(str(error)) from error


class UnprovedError(Exception):
    """A call whose value has no expression, so nothing can be proved of the graph."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.node = node


def _arguments(arg: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(arg, fx.Node):
        return values[arg]
    if isinstance(arg, _SEQUENCES):
        return tuple([_arguments(item, values) for item in arg])
    return arg


def _keyed(arg: Any) -> Any:
    """Return a key of an argument; 1, 1.0 and True differ."""
    if isinstance(arg, Value):
        return arg.body, arg.shape, arg.dtype, arg.interleaved
    if isinstance(arg, tuple):
        return tuple(map(_keyed, arg))
    return type(arg), arg


def _plain_type(arg: Any) -> Any:
    if isinstance(arg, Value):
        return ValueType(arg.shape, arg.dtype)
    if isinstance(arg, tuple):
        return tuple(map(_plain_type, arg))
    return arg
