"""Composite ops: each is its body, a function that is written once over other ops.

Run on tensors, the body is the op's reference and its fake. Run on types, each call applies the
rule of the op that it calls. Run on placeholders, it gives the pattern of calls that the op fuses.
The schema follows from the body's signature, the cost and the rank-local arguments from its calls.
Requirements that are stricter than those of the calls are an explicit check beside the body.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from tpcompile.ir.ops.linear import LINEAR
from tpcompile.ir.ops.spec import (
    SPECS,
    Cost,
    CostRule,
    Localize,
    Rule,
    define,
    numel,
    schema_types,
    streaming_cost,
)
from tpcompile.ir.pattern import UNKNOWN, Call, Number, Optional, Value
from tpcompile.ir.types import ValueType
from tpcompile.ir.values.build import ValueRule
from tpcompile.ir.values.scope import Scope
from tpcompile.ir.values.value import Value as ExprValue

aten = torch.ops.aten
_COMMUTES = (aten.add.Tensor, aten.mul.Tensor)


@dataclass(frozen=True)
class Operand:
    """A stand-in for a tensor in a body; calls of ops on it go to its interpreter."""

    kind: Any
    """The type of the tensor, or the pattern of the call that computes it."""
    interpret: Callable[[Any, tuple[Any, ...]], Any]
    """A function that returns the kind of a call's result, given the target and the arguments."""

    @property
    def shape(self) -> Any:
        return getattr(self.kind, "shape", UNKNOWN)

    @property
    def dtype(self) -> Any:
        return getattr(self.kind, "dtype", UNKNOWN)

    @classmethod
    def __torch_function__(
        cls, target: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        bound = SPECS[target].bind(args, kwargs).values() if kwargs else args
        return next(arg for arg in args if isinstance(arg, cls)).called(target, *bound)

    def called(self, target: Any, *args: Any) -> Any:
        kind = self.interpret(target, _kind(args))
        if isinstance(kind, tuple):
            return tuple(type(self)(item, self.interpret) for item in kind)
        return type(self)(kind, self.interpret)

    def __getitem__(self, index: int) -> Any:
        return self.called(operator.getitem, self, index)

    def __add__(self, other: Any) -> Any:
        return self.called(aten.add.Tensor, self, other)

    def __mul__(self, other: Any) -> Any:
        return self.called(aten.mul.Tensor, self, other)

    def to(self, dtype: Any) -> Any:
        return self.called(aten.to.dtype, self, dtype)


def _kind(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return tuple(map(_kind, arg))
    return arg.kind if isinstance(arg, Operand) else arg


@dataclass(frozen=True)
class Part:
    """A function of tensors that bodies may call although it is not an op, and its two rules."""

    function: Callable[..., Any]
    rule: Rule
    value: ValueRule | None = None
    """None for a function that is only known to depend on its operands."""

    def __call__(self, *args: Any) -> Any:
        operand = next((arg for arg in args if isinstance(arg, Operand)), None)
        return operand.called(self, *args) if operand else self.function(*args)


def optional(target: Any, x: Any, other: Any, *rest: Any) -> Any:
    """Call an op on `x` and an optional operand; without the operand, the result is `x`."""
    result = x if other is None else target(x, other, *rest)
    traced = isinstance(x, Operand) and isinstance(result.kind, Call)
    return Operand(Optional(result.kind), x.interpret) if traced else result


def known(function: Callable[..., Any], *args: Any) -> Any:
    """Compute an argument from dtypes or extents; in a pattern they are unknown."""
    return UNKNOWN if UNKNOWN in args else function(*args)


def composite(
    body: Callable[..., Any],
    *,
    check: Callable[..., None] = lambda **_: None,
    reasons: Mapping[str, str] | None = None,
    cost: CostRule | None = None,
    **others: Any,
) -> Any:
    """Declare the op with this body and return its node target; `others` are as for `define`.

    `check` refuses operands, by name, that the calls of the body would accept. `reasons` are those
    for refusing two values of a number that the body uses twice.
    """
    types = schema_types(body)
    del types["return"]
    calls: list[Call] = []

    def trace(target: Any, args: tuple[Any, ...]) -> Call:
        calls.append(_call(target, args))
        return calls[-1]

    def run(interpret: Callable[..., Any], bound: Mapping[str, Any]) -> Any:
        tensors = {n: k for n, k in bound.items() if isinstance(k, ValueType | Value)}
        missing = [n for n, kind in types.items() if kind == "Tensor" and n not in tensors]
        if missing:
            raise TypeError(f"{missing[0]} must be a tensor, got {bound[missing[0]]}")
        return _kind(body(**{**bound, **{n: Operand(k, interpret) for n, k in tensors.items()}}))

    @wraps(body)  # the explorer shows the body as the rule
    def rule(**bound: Any) -> Any:
        check(**bound)
        return run(_infer, bound)

    pattern = run(trace, {n: _placeholder(n, kind, reasons or {}) for n, kind in types.items()})
    weights = tuple(call.args[1].name for call in calls if call.target is LINEAR)
    tensors = [n for n, kind in types.items() if "Tensor" in kind]
    cost = cost or _cost([tensors.index(weight) for weight in weights])
    others.setdefault("localize", _localize(calls))
    others.setdefault("value", value_of_body(body))
    others["in_formats"] = (*weights, *others.get("in_formats", ()))
    return define(body, rule=rule, cost=cost, pattern=pattern, **others)


def value_of_body(body: Callable[..., Any], stand_in: type[Operand] = Operand) -> ValueRule:
    """Return the rule that reads the calls of a body one by one, with stand-ins of this class."""

    @wraps(body)
    def value(scope: Scope, **given: Any) -> Any:
        operands = {
            name: stand_in(arg, scope.interpret) if isinstance(arg, ExprValue) else arg
            for name, arg in given.items()
        }
        return _kind(body(**operands))

    return value


def pattern_of(function: Callable[..., Any], *names: str) -> Any:
    """Return the pattern of the calls that a function of tensors with these names makes."""
    return _kind(function(*(Operand(Value(name), _call) for name in names)))


def _call(target: Any, args: tuple[Any, ...]) -> Call:
    return Call(target, args, target in _COMMUTES)


def _infer(target: Any, kinds: tuple[Any, ...]) -> Any:
    if isinstance(target, Part):
        return target.rule(*kinds)
    return SPECS[target].rule(**SPECS[target].bind(kinds, {}))


def _placeholder(name: str, kind: str, reasons: Mapping[str, str]) -> Any:
    if "Tensor" in kind:
        return Value(name, kind == "Tensor?")
    if kind in ("int[]", "int[]?", "ScalarType"):
        return UNKNOWN
    return Number(name, reasons.get(name, Number.unequal))


def _cost(weights: Sequence[int]) -> CostRule:
    """Return the cost of reading the operands, writing the result, and products with weights.

    Values between the calls stay in registers. Beside a product, other operations are negligible.
    """

    def cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
        whole = streaming_cost(result, operands, rank)
        flops = sum(2 * numel(operands[place].local_shape(rank)) for place in weights)
        return Cost(flops or whole.flops, whole.memory_bytes)

    return cost


def _localize(calls: Sequence[Call]) -> Localize | None:
    """Return the rank-local arguments of the calls that take only arguments of the op itself."""
    owners = []
    for call in calls:
        spec = SPECS.get(call.target)
        if spec and spec.localize and all(isinstance(arg, Value | Number) for arg in call.args):
            names = zip(spec.argument_names, (arg.name for arg in call.args), strict=False)
            owners.append((spec.rule, spec.localize, dict(names)))

    def localize(result: Any, rank: int, **bound: Any) -> dict[str, Any]:
        local: dict[str, Any] = {}
        for rule, local_arguments, names in owners:
            call_arguments = {name: bound[outer] for name, outer in names.items()}
            localized = local_arguments(rule(**call_arguments), rank, **call_arguments)
            local |= {names[name]: value for name, value in localized.items()}
        return local

    return localize if owners else None
