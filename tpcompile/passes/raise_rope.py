"""Pass `raise-rope`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ROPE
from tpcompile.ir.ops.parts import END
from tpcompile.rewriting.pattern import Bindings, Call, Number, Value, check
from tpcompile.rewriting.rewrite import Report, insert, rewrite

aten = torch.ops.aten

_X = Value("x")
_LOW = Call(aten.slice.Tensor, (_X, Number("low_dim"), 0, Number("middle")))
_HIGH = Call(aten.slice.Tensor, (_X, Number("high_dim"), Number("start"), Number("end")))
_TURNED = Call(aten.cat.default, ([Call(aten.neg.default, (_HIGH,)), _LOW], -1))
_STRAIGHT = Call(aten.mul.Tensor, (_X, Call(aten.unsqueeze.default, (Value("cos"), 0))), True)
_ACROSS = Call(aten.mul.Tensor, (_TURNED, Call(aten.unsqueeze.default, (Value("sin"), 0))), True)
PATTERN = Call(aten.add.Tensor, (_STRAIGHT, _ACROSS), commutes=True)
_FIRST = Call(aten.slice.Tensor, (_X, Number("dim"), 0, Number("width")))
_ROTATED = Call(ROPE, (Call(aten.transpose.int, (_FIRST, 0, 1)), Value("cos"), Value("sin")))
_REST = Call(aten.slice.Tensor, (_X, Number("dim"), Number("width"), Number("end")))
PARTIAL = Call(aten.cat.default, ([Call(aten.transpose.int, (_ROTATED, 0, 1)), _REST], -1))


@dataclass(frozen=True)
class RaiseRope:
    """Recognise the rotation of heads by position; insert transposes, as the op takes tokens first.

    %a = %x * unsqueeze(%cos, 0)                      %t = transpose(%x, 0, 1)
    %b = cat([neg(slice(%x, 2, w/2, end)),       →    %r = tpc.rope(%t, %cos, %sin)
              slice(%x, 2, 0, w/2)], -1)              %y = transpose(%r, 0, 1)
    %y = %a + %b * unsqueeze(%sin, 0)

    Where only the first elements of a head are rotated, it includes the rest.
    """

    name: ClassVar[str] = "raise-rope"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)
    before: ClassVar[tuple[str, ...]] = ("fuse-norm-qkv",)

    def apply(self, gm: fx.GraphModule) -> Report:
        report = rewrite(gm, PATTERN, _replacement).require(gm, "rotation of heads", ROPE)
        rewrite(gm, PARTIAL, _of_whole_heads)
        return report


def _replacement(node: fx.Node, found: Bindings) -> fx.Node:
    x, cos, sin = found["x"], found["cos"], found["sin"]
    shape = value_type(x).shape
    width = shape[-1]
    check(
        len(shape) == 3 and isinstance(width, int),
        x,
        f"x must have shape [heads, T, width], got {shape}",
    )
    assert isinstance(width, int)
    half = width // 2
    check(
        found["low_dim"] % 3 == 2 and found["high_dim"] % 3 == 2,
        x,
        "the halves must be slices of the last axis",
    )
    check(
        found["middle"] == half and found["start"] == half and found["end"] >= min(END, width),
        x,
        f"the halves must be cut at {half}, got {found['middle']} and {found['start']}",
    )
    check(
        value_type(cos).shape == (shape[1], width),
        cos,
        f"the table must have shape {(shape[1], width)}, got {value_type(cos).shape}",
    )
    check(
        cos.args[0] is sin.args[0] and (cos.args[1], sin.args[1]) == (0, 1),
        cos,
        "cos and sin must be the two tables of one rotary module, in this order",
    )
    tokens_first = insert(node, aten.transpose.int, x, 0, 1)
    rotated = insert(node, ROPE, tokens_first, cos, sin)
    return insert(node, aten.transpose.int, rotated, 0, 1)


def _of_whole_heads(node: fx.Node, found: Bindings) -> fx.Node:
    x = found["x"]
    shape = value_type(x).shape
    last = found["dim"] == len(shape) - 1 == 2 and value_type(node).shape == shape
    check(
        last and found["end"] >= min(END, int(shape[-1])), node, "it must keep the other elements"
    )
    tokens_first = insert(node, aten.transpose.int, x, 0, 1)
    rotated = insert(node, ROPE, tokens_first, found["cos"], found["sin"])
    return insert(node, aten.transpose.int, rotated, 0, 1)
