"""Expressions of linear attention, from the start of sequences or after kept states."""

from __future__ import annotations

from typing import Any

from tpcompile.ir.values.build import called, shared_heads, without_batch
from tpcompile.ir.values.node import Term
from tpcompile.ir.values.scope import LayerState, Rewrite, Scope
from tpcompile.ir.values.value import OpaqueError, Value

CONV, RULE = "tpc.causal_conv", "tpc.gated_delta_rule"
RESUMED = "resumed "
"""Prefix of the names of calls that read a kept state."""
FROM_THE_START = Rewrite(
    "from-the-start",
    "linear attention that resumes from states is linear attention, if the sequences are new",
    adds_states=True,
)


def conv_value(
    scope: Scope, x: Value, weight: Value, bias: Value | None, starts: Value, layer: int
) -> Value:
    """Return the convolution of channels; `layer` only names it."""
    bound = {"x": without_batch(x, 2), "weight": weight, "bias": bias, "starts": starts}
    return _called(scope, CONV, bound, x)


def rule_value(
    scope: Scope,
    q: Value,
    k: Value,
    v: Value,
    decay: Value,
    beta: Value,
    starts: Value,
    layer: int,
    k_heads: Any = None,
) -> Value:
    """Return the gated delta rule; `layer` only names it."""
    return _called(scope, RULE, _operands(scope, q, k, v, decay, beta, starts, k_heads), v)


def resumed_conv_value(
    scope: Scope,
    x: Value,
    weight: Value,
    bias: Value | None,
    tails: Value,
    starts: Value,
    layer: int,
    **sequences: Value,
) -> Value:
    """Return the convolution after the kept inputs, and keep the last ones."""
    bound = {"x": x, "weight": weight, "bias": bias, "starts": starts}
    return _resumed(scope, CONV, bound, sequences, tails, layer, x)


def resumed_rule_value(
    scope: Scope,
    q: Value,
    k: Value,
    v: Value,
    decay: Value,
    beta: Value,
    states: Value,
    starts: Value,
    layer: int,
    k_heads: Any = None,
    **sequences: Value,
) -> Value:
    """Return the gated delta rule after the kept states, and keep the new ones."""
    bound = _operands(scope, q, k, v, decay, beta, starts, k_heads)
    return _resumed(scope, RULE, bound, sequences, states, layer, v)


def _operands(
    scope: Scope,
    q: Value,
    k: Value,
    v: Value,
    decay: Value,
    beta: Value,
    starts: Value,
    k_heads: Any,
) -> dict[str, Any]:
    """Return the operands, with a query and a key for each value head."""
    if k_heads is not None:
        raise OpaqueError("the map of heads of a rank follows from the layouts")
    heads = [shared_heads(scope.terms, operand, -2, v.shape[-2]) for operand in (q, k)]
    wide = {name: without_batch(item, 3) for name, item in zip("qkv", (*heads, v), strict=True)}
    gates = {"decay": without_batch(decay, 2), "beta": without_batch(beta, 2)}
    return {**wide, **gates, "starts": starts}


def _resumed(
    scope: Scope,
    name: str,
    bound: dict[str, Any],
    sequences: dict[str, Value],
    states: Value,
    layer: int,
    like: Value,
) -> Value:
    before = scope.state(states, layer)
    operands = {**bound, **sequences}
    result = _called(scope, RESUMED + name, operands, like, before.term)
    after = _called(scope, f"state after {name}", operands, like, before.term)
    scope.write(states, layer, LayerState(after.body.args[0]))
    if not before.initial or not scope.allows(FROM_THE_START):
        return result
    scope.leave_out(result)
    return _called(scope, name, bound, like)


def _called(
    scope: Scope, name: str, bound: dict[str, Any], like: Value, state: Term | None = None
) -> Value:
    (result,) = called(scope.terms, name, bound, (like.shape, like.dtype), state=state)
    return result
