"""Pass `raise-norm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import RMS_NORM
from tpcompile.ir.pattern import UNKNOWN
from tpcompile.rewriting.pattern import Bindings, Call, Maybe, Number, Value, check
from tpcompile.rewriting.rewrite import Report, insert, rewrite_each

aten = torch.ops.aten

_WIDE = Value("wide")
_MEAN_SQUARE = Call(aten.mean.dim, (Call(aten.pow.Tensor_Scalar, (_WIDE, 2)), [-1], True))
_SCALE = Call(aten.rsqrt.default, (Call(aten.add.Tensor, (_MEAN_SQUARE, Number("eps"))),))
_NORMED = Maybe(aten.to.dtype, Call(aten.mul.Tensor, (_WIDE, _SCALE), commutes=True))
PATTERN = Call(aten.mul.Tensor, (Value("weight"), _NORMED), commutes=True)
_CENTERED_SCALE = Call(aten.add.Tensor, (Maybe(aten.to.dtype, Value("weight")), 1.0), True)
_WIDE_NORMED = Call(aten.mul.Tensor, (_WIDE, _SCALE), commutes=True)
ZERO_CENTERED = Call(aten.mul.Tensor, (_WIDE_NORMED, _CENTERED_SCALE), commutes=True)
_MEAN = Call(aten.mean.dim, (_WIDE, [-1], True))
_CENTRED, _CENTRED_AGAIN = (Call(aten.sub.Tensor, (_WIDE, _MEAN)) for _ in range(2))
_SQUARED = Call(aten.pow.Tensor_Scalar, (_CENTRED_AGAIN, 2))
_VARIANCE = Call(aten.mean.dim, (_SQUARED, [-1], True))
_DEVIATION = Call(aten.rsqrt.default, (Call(aten.add.Tensor, (_VARIANCE, Number("eps"))),))
_STANDARD = Call(aten.mul.Tensor, (_CENTRED, _DEVIATION), commutes=True)
_WEIGHT = Maybe(aten.to.dtype, Value("weight"))
LAYER_NORM = Call(aten.mul.Tensor, (_WEIGHT, _STANDARD), commutes=True)
_ROUNDED = Call(aten.to.dtype, (ZERO_CENTERED, UNKNOWN))


@dataclass(frozen=True)
class RaiseNorm:
    """Recognise RMS norm, over the hidden width or over a head, and layer norm.

    %p = pow(%x, 2)
    %m = mean(%p, dim=[-1], keepdim=True)
    %r = rsqrt(%m + eps)                      →   %n = tpc.rms_norm(%x, %w, eps)
    %n = %w * (%x * %r)

    A scale of `1 + %w` gives a norm that is `zero_centered`. A layer norm that a model spells out
    gives aten.layer_norm.
    """

    name: ClassVar[str] = "raise-norm"
    before: ClassVar[tuple[str, ...]] = ("fuse-add-norm", "fuse-norm-linear")

    def apply(self, gm: fx.GraphModule) -> Report:
        return rewrite_each(gm, _RULES).require(gm, "RMS norm", RMS_NORM, aten.layer_norm.default)


def _plain(node: fx.Node, bindings: Bindings) -> fx.Node:
    return insert(node, RMS_NORM, *_operands(node, bindings))


def _zero_centered(node: fx.Node, bindings: Bindings) -> fx.Node:
    return insert(node, RMS_NORM, *_operands(node, bindings), True)


def _layer_norm(node: fx.Node, bindings: Bindings) -> fx.Node:
    x, weight, eps = _operands(node, bindings)
    return insert(node, aten.layer_norm.default, x, [value_type(x).shape[-1]], weight, None, eps)


def _operands(node: fx.Node, bindings: Bindings) -> tuple[fx.Node, fx.Node, float]:
    x = _unwidened(bindings["wide"])
    weight = bindings["weight"]
    kind = value_type(x)
    check(weight.op == "get_attr", weight, "the scale of a norm must be a parameter")
    check(
        value_type(weight).shape == kind.shape[-1:],
        weight,
        f"the scale must have shape {kind.shape[-1:]}, got {value_type(weight).shape}",
    )
    check(value_type(bindings["wide"]).dtype == torch.float32, x, "the mean must be taken in fp32")
    check(value_type(node).dtype == kind.dtype, node, "the result must have the dtype of x")
    return x, weight, bindings["eps"]


def _unwidened(wide: fx.Node) -> fx.Node:
    """Return the value before its cast to fp32, if there is a cast."""
    source = wide.args[0] if wide.target is aten.to.dtype else wide
    assert isinstance(source, fx.Node)
    return source


_RULES = (
    (Call(aten.to.dtype, (LAYER_NORM, UNKNOWN)), _layer_norm),
    (LAYER_NORM, _layer_norm),  # where nothing is rounded, in fp32
    (PATTERN, _plain),
    (_ROUNDED, _zero_centered),
    (ZERO_CENTERED, _zero_centered),  # where nothing is rounded, in fp32
)
