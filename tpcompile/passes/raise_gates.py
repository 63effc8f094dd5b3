"""Pass `raise-gates`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import DELTA_DECAY, GATED_RMS_NORM, LINEAR, RMS_NORM, SIGMOID_GATE, SPECS
from tpcompile.ir.pattern import UNKNOWN
from tpcompile.rewriting.pattern import Bindings, Call, Maybe, Number, Value, check
from tpcompile.rewriting.rewrite import Report, insert, rewrite_each

aten = torch.ops.aten

_RATE = Call(aten.exp.default, (Maybe(aten.to.dtype, Value("rate")),))
_STEP = Call(aten.add.Tensor, (Maybe(aten.to.dtype, Value("a")), Value("bias")), commutes=True)
_DECAY = Call(
    aten.mul.Tensor,
    (Call(aten.neg.default, (_RATE,)), Call(aten.softplus.default, (_STEP,))),
    commutes=True,
)
_NORMED = Call(RMS_NORM, (Value("x"), Value("weight"), Number("eps")))
_SILU = Call(aten.silu.default, (Maybe(aten.to.dtype, Value("gate")),))
_GATED_NORM = Call(aten.mul.Tensor, (_NORMED, _SILU), commutes=True)
_ROUNDED = Call(aten.to.dtype, (_GATED_NORM, UNKNOWN))


@dataclass(frozen=True)
class RaiseGates:
    """Recognise the gates of linear attention, and the output gate of attention.

    %d = neg(exp(%rate)) * softplus(%a + %bias)     →   %d = tpc.delta_decay(%a, %rate, %bias)

    %n = tpc.rms_norm(reshape(%o, [-1, w]), %w)
    %g = %n * silu(reshape(%z, [-1, w]))            →   %g = tpc.gated_rms_norm(%o, %z, %w)
    %y = reshape(%g, [%T, -1])                          %y = flatten(%g)

    %y = %o * sigmoid(%g)                           →   %y = tpc.sigmoid_gate(%o, %g)
    """

    name: ClassVar[str] = "raise-gates"
    after: ClassVar[tuple[str, ...]] = ("canonicalize", "raise-norm")
    before: ClassVar[tuple[str, ...]] = ("raise-swiglu",)

    def apply(self, gm: fx.GraphModule) -> Report:
        return rewrite_each(gm, _RULES)


def _decay(node: fx.Node, bindings: Bindings) -> fx.Node:
    for name in ("rate", "bias"):
        check(bindings[name].op == "get_attr", node, f"its {name} must be a parameter")
    check(value_type(node).dtype == torch.float32, node, "the decay must be computed in fp32")
    return insert(node, DELTA_DECAY, bindings["a"], bindings["rate"], bindings["bias"])


def _gated_norm(node: fx.Node, bindings: Bindings) -> fx.Node:
    """Undo the merging of tokens and heads, and return the merged result for other readers."""
    x, gate = (_before_merge(bindings[name]) for name in ("x", "gate"))
    check(value_type(x) == value_type(gate), node, "the gate must have the type of the heads")
    check(value_type(node).dtype == value_type(x).dtype, node, "the result must be rounded once")
    normed = insert(node, GATED_RMS_NORM, x, gate, bindings["weight"], bindings["eps"])
    normed.meta["type"] = value_type(x)
    return insert(node, aten.reshape.default, normed, [-1, value_type(x).shape[-1]])


def _before_merge(merged: fx.Node) -> fx.Node:
    """Return the heads `[T, heads, width]` that a view merges to `[T * heads, width]`."""
    views = (aten.view.default, aten.reshape.default)
    check(merged.target in views, merged, "it does not merge heads")
    heads = operand(merged)
    check(value_type(heads).dims == 3, heads, "it must have the shape [T, heads, width]")
    return heads


def _after_merge(node: fx.Node, bindings: Bindings) -> fx.Node:
    """Undo the merging of tokens and heads: return the heads, or the features of a token."""
    heads: fx.Node = bindings["x"]
    if value_type(node) == value_type(heads):
        return heads
    shape = value_type(heads).shape
    check(
        value_type(node).shape == (shape[0], _product(shape)) and len(shape) == 3,
        node,
        "it must merge the heads of a token",
    )
    return insert(node, aten.flatten.using_ints, heads, 1, 2)


def _product(shape: tuple[int | str, ...]) -> int:
    *_, heads, width = shape
    return heads * width if isinstance(heads, int) and isinstance(width, int) else 0


def _sigmoid_gate(node: fx.Node, bindings: Bindings) -> fx.Node:
    x, gate = bindings["x"], bindings["gate"]
    check(x.target is not LINEAR, node, "it is the activation of an MLP")
    check(value_type(x) == value_type(gate), node, "the gate must have the type of the value")
    return insert(node, SIGMOID_GATE, x, gate)


_MERGED = Call(aten.reshape.default, (Call(aten.reshape.default, (Value("x"), UNKNOWN)), UNKNOWN))
_RULES = (
    (_DECAY, _decay),
    (_ROUNDED, _gated_norm),
    (_GATED_NORM, _gated_norm),
    (_MERGED, _after_merge),
    (SPECS[SIGMOID_GATE].pattern, _sigmoid_gate),
)
