"""Rules of values that several ops share: elementwise ops, ops over the last axis, and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tpcompile.ir.values.index import BOUND, Index, divided, variable
from tpcompile.ir.values.node import CAST, Dim, Term, is_exact
from tpcompile.ir.values.scope import Rewrite, Scope
from tpcompile.ir.values.term import Terms
from tpcompile.ir.values.value import (
    OpaqueError,
    Value,
    broadcast_to,
    coordinates,
    element_at,
    extent_of,
    last_bound,
    own_indices,
    viewed,
)

BIAS_AFTER_SUM = Rewrite(
    "bias-after-sum",
    "a bias may be added to the sum of the ranks' terms, which is rounded after it",
)
ValueRule = Callable[..., Any]
"""Rule that returns the value of an op, given a scope and the op's arguments by name."""


def pointwise(
    terms: Terms, head: Any, operands: Sequence[Value | float], dtype: torch.dtype
) -> Value:
    """Return an op on the elements of operands that are broadcast together."""
    values = [operand for operand in operands if isinstance(operand, Value)]
    shape = broadcast_shape([value.shape for value in values])
    args = [
        broadcast_to(terms, operand, shape) if isinstance(operand, Value) else terms.const(operand)
        for operand in operands
    ]
    interleaved = any(value.interleaved for value in values)
    return Value(shape, dtype, terms.element(head, args, dtype), interleaved)


def broadcast_shape(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    if len(set(shapes)) == 1:
        return shapes[0]
    width = max(map(len, shapes))
    result: list[Dim] = []
    for column in zip(*((1,) * (width - len(shape)) + shape for shape in shapes), strict=True):
        extents = {extent for extent in column if extent != 1}
        if len(extents) > 1:
            raise OpaqueError(f"shapes {shapes} cannot be broadcast together")
        result.append(extents.pop() if extents else 1)
    return tuple(result)


def cast(terms: Terms, value: Value, dtype: torch.dtype) -> Value:
    body = terms.cast(value.body, dtype)
    return Value(value.shape, dtype, body, value.interleaved)


def linear(terms: Terms, x: Value, weight: Value, bias: Value | None) -> Value:
    """Return a linear, whose sum and bias are rounded once."""
    features, rows = x.shape[-1], weight.shape[0]
    shape = (*x.shape[:-1], rows)
    *tokens, row = coordinates(shape)
    bound = _bound(features)
    operands = [element_at(terms, x, [*tokens, bound]), element_at(terms, weight, [row, bound])]
    body = terms.over("linear", (extent_of(features),), operands, x.dtype)
    if bias is not None:
        body = terms.element("bias", [body, element_at(terms, bias, [row])], x.dtype)
    return Value(shape, x.dtype, body)


def _bound(extent: Dim) -> Index:
    return variable(BOUND, 0, extent_of(extent))


def reduced(terms: Terms, head: Any, x: Value, dtype: torch.dtype) -> Value:
    """Return an op that makes one element of the last axis, which is kept."""
    body = terms.over(head, (extent_of(x.shape[-1]),), [last_bound(terms, x)], dtype)
    return Value((*x.shape[:-1], 1), dtype, body)


def along_last(terms: Terms, head: Any, x: Value, extent: Dim, dtype: torch.dtype) -> Value:
    """Return an op that makes `extent` elements of the last axis, such as a softmax."""
    shape = (*x.shape[:-1], extent)
    place = coordinates(shape)[-1]
    bound = (extent_of(x.shape[-1]),)
    body = terms.over(head, bound, [last_bound(terms, x)], dtype, (place,))
    return Value(shape, dtype, body)


def called(
    terms: Terms,
    name: str,
    bound: Mapping[str, Any],
    *results: tuple[tuple[Dim, ...], Any],
    state: Term | None = None,
) -> tuple[Value, ...]:
    """Return the results, each a shape and a dtype, of an op on whole values, and on a state."""
    head, args = call_of(name, bound)
    operands = [terms.whole(*arg) for arg in args]
    source = terms.call(head, operands if state is None else [*operands, state])
    return tuple(
        Value(shape, dtype, terms.read(source, own_indices(shape), place, dtype))
        for place, (shape, dtype) in enumerate(results)
    )


def call_of(name: str, bound: Mapping[str, Any]) -> tuple[Any, list[tuple[tuple[Dim, ...], Term]]]:
    """Return the head of a call, with the arguments that are not values, and its operands."""
    args: list[tuple[tuple[Dim, ...], Term]] = []
    head = (name, *((key, _signature(arg, args)) for key, arg in bound.items()))
    return head, args


def _signature(arg: Any, args: list[tuple[tuple[Dim, ...], Term]]) -> Any:
    if isinstance(arg, Value):
        args.append((arg.shape, arg.body))
        return "value"
    if isinstance(arg, list | tuple):
        return tuple(_signature(item, args) for item in arg)
    return type(arg).__name__, arg


def without_batch(value: Value, dims: int) -> Value:
    """Drop leading axes with one element, which models require before `canonicalize`."""
    shape = value.shape
    while len(shape) > dims and shape[0] == 1:
        shape = shape[1:]
    return Value(shape, value.dtype, value.body, value.interleaved)


def shared_heads(terms: Terms, value: Value, dim: int, heads: Dim) -> Value:
    """Repeat heads for readers that share them evenly, in order."""
    shared = value.shape[dim]
    if shared == heads:
        return value
    if extent_of(heads) % extent_of(shared):
        raise OpaqueError(f"{heads} heads cannot share {shared} evenly")
    shape = list(value.shape)
    shape[dim] = heads
    indices = coordinates(shape)
    indices[dim] = divided(indices[dim], extent_of(heads) // extent_of(shared))[0]
    return viewed(terms, value, shape, indices)


def result_dtype(*operands: Value | float) -> torch.dtype:
    """Return torch's result dtype; a value without dimensions has a lower priority than others."""
    dtypes = {operand.dtype for operand in operands if isinstance(operand, Value)}
    if len(dtypes) == 1 and next(iter(dtypes)).is_floating_point:
        return dtypes.pop()
    stand_ins: list[Any] = [
        torch.empty((1,) * min(operand.dims, 1), dtype=operand.dtype, device="meta")
        if isinstance(operand, Value)
        else operand
        for operand in operands
    ]
    dtype = stand_ins[0].dtype
    for other in stand_ins[1:]:
        dtype = torch.result_type(stand_ins[0], other)
    return dtype  # type: ignore[no-any-return]


def elementwise(name: str) -> ValueRule:
    """Return the rule of an op that computes each element from one element of each operand."""

    def value(scope: Scope, **bound: Any) -> Value:
        operands = [bound[key] for key in ("self", "other", "exponent") if key in bound]
        options = tuple(
            (key, arg)
            for key, arg in bound.items()
            if key not in ("self", "other", "exponent") and (key, arg) != ("alpha", 1)
        )
        head = (name, *options) if options else name
        biased = _biased(scope.terms, *operands) if head == "add" else None
        if biased is not None and scope.allows(BIAS_AFTER_SUM):
            return biased
        return pointwise(scope.terms, head, operands, result_dtype(*operands))

    return value


def _biased(terms: Terms, total: Value | float, bias: Value | float) -> Value | None:
    """Return the linear with a bias, given its sum, not rounded to 16 bits, and the bias.

    Return None for other operands.
    """
    if not (isinstance(total, Value) and isinstance(bias, Value) and bias.dims == 1):
        return None
    body = total.body
    if body.kind == "element" and body.head == CAST:
        body = body.args[0]
    known = body.kind == "over" and body.head[0] == "linear" and body.dtype == bias.dtype
    known &= is_exact(torch.float32, total.dtype)
    if not known or bias.body.kind != "read" or bias.body.args[0].kind != "tensor":
        return None
    assert body.dtype is not None
    projected = Value(total.shape, body.dtype, body)
    return cast(terms, pointwise(terms, "bias", [projected, bias], body.dtype), total.dtype)


def unchanged(scope: Scope, **bound: Any) -> Value:
    """Return the first operand: the rule of copies, and of moves between ranks, maybe with a cast.

    A value is the union of the ranks' parts, or the sum of their terms, as their types prove.
    """
    value: Value = next(iter(bound.values()))
    dtype = bound.get("dtype")
    return value if dtype is None else cast(scope.terms, value, dtype)
