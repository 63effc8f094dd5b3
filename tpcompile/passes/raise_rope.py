"""Pass `raise-rope`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import ROPE, ROPE_PAIRS
from tpcompile.ir.ops.parts import END
from tpcompile.ir.pattern import UNKNOWN
from tpcompile.rewriting.pattern import Bindings, Call, Maybe, Number, Value, check
from tpcompile.rewriting.rewrite import Report, insert, rewrite_each

aten = torch.ops.aten

_X = Value("x")
_LOW = Call(aten.slice.Tensor, (_X, Number("low_dim"), 0, Number("middle")))
_HIGH = Call(aten.slice.Tensor, (_X, Number("high_dim"), Number("start"), Number("end")))
_TURNED = Call(aten.cat.default, ([Call(aten.neg.default, (_HIGH,)), _LOW], -1))
_STRAIGHT = Call(aten.mul.Tensor, (_X, Call(aten.unsqueeze.default, (Value("cos"), 0))), True)
_ACROSS = Call(aten.mul.Tensor, (_TURNED, Call(aten.unsqueeze.default, (Value("sin"), 0))), True)
PATTERN = Call(aten.add.Tensor, (_STRAIGHT, _ACROSS), commutes=True)
_FIRST = Call(aten.slice.Tensor, (_X, Number("dim"), 0, Number("width")))
_REST = Call(aten.slice.Tensor, (_X, Number("dim"), Number("width"), Number("end")))


def _of_first_elements(op: Any, *options: Number) -> Call:
    """Return the pattern of a rotation of the first elements of a head, and of the others."""
    tables = (Value("cos"), Value("sin"))
    rotated = Call(op, (Call(aten.transpose.int, (_FIRST, 0, 1)), *tables, *options))
    return Call(aten.cat.default, ([Call(aten.transpose.int, (rotated, 0, 1)), _REST], -1))


PARTIAL = _of_first_elements(ROPE)
PARTIAL_PAIRS = _of_first_elements(ROPE_PAIRS, Number("halves"), Number("wide"))


def _pairs(halves: bool) -> Call:
    """Return the pattern of a rotation of adjacent elements; see `tpc.rope_pairs` for tables."""
    heads = Maybe(aten.to.dtype, _X)
    even, odd = (
        Call(aten.slice.Tensor, (heads, Number("dim"), first, Number(end), 2))
        for first, end in ((0, "even_end"), (1, "odd_end"))
    )
    stacked = Call(aten.stack.default, ([Call(aten.neg.default, (odd,)), even], -1))
    turned = Maybe(aten.to.dtype, Call(aten.flatten.using_ints, (stacked, -2)))
    products = (
        Call(aten.mul.Tensor, (operand, _table(name, halves)), commutes=True)
        for operand, name in ((heads, "cos"), (turned, "sin"))
    )
    return Call(aten.add.Tensor, tuple(products), commutes=True)


def _table(name: str, halves: bool) -> Call:
    table = Call(aten.unsqueeze.default, (Value(name), 0))
    if not halves:
        return table
    half = Call(aten.slice.Tensor, (table, Number("dim"), 0, Number("half")))
    return Call(aten.repeat_interleave.self_int, (half, 2, -1))


@dataclass(frozen=True)
class RaiseRope:
    """Recognise the rotation of heads by position; insert transposes, as the op takes tokens first.

    %a = %x * unsqueeze(%cos, 0)                      %t = transpose(%x, 0, 1)
    %b = cat([neg(slice(%x, 2, w/2, end)),       →    %r = tpc.rope(%t, %cos, %sin)
              slice(%x, 2, 0, w/2)], -1)              %y = transpose(%r, 0, 1)
    %y = %a + %b * unsqueeze(%sin, 0)

    Where only the first elements of a head are rotated, it includes the rest. A rotation of
    adjacent elements gives tpc.rope_pairs.
    """

    name: ClassVar[str] = "raise-rope"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)
    before: ClassVar[tuple[str, ...]] = ("fuse-norm-qkv",)

    def apply(self, gm: fx.GraphModule) -> Report:
        rules = [(PATTERN, _replacement)]
        for halves in (False, True):
            pairs, replacement = _pairs(halves), partial(_replacement_of_pairs, halves)
            rules += [(Call(aten.to.dtype, (pairs, UNKNOWN)), replacement), (pairs, replacement)]
        report = rewrite_each(gm, rules).require(gm, "rotation of heads", ROPE, ROPE_PAIRS)
        rewrite_each(gm, ((pattern, _of_whole_heads) for pattern in (PARTIAL, PARTIAL_PAIRS)))
        return report


def _replacement(node: fx.Node, bindings: Bindings) -> fx.Node:
    x = bindings["x"]
    width = _check_tables(x, bindings["cos"], bindings["sin"])
    half = width // 2
    check(
        bindings["low_dim"] % 3 == 2 and bindings["high_dim"] % 3 == 2,
        x,
        "the halves must be slices of the last axis",
    )
    check(
        bindings["middle"] == half
        and bindings["start"] == half
        and bindings["end"] >= min(END, width),
        x,
        f"the halves must be cut at {half}, got {bindings['middle']} and {bindings['start']}",
    )
    return _rotation(node, ROPE, x, bindings)


def _replacement_of_pairs(halves: bool, node: fx.Node, bindings: Bindings) -> fx.Node:
    x = bindings["x"]
    width, dtype = _check_tables(x, bindings["cos"], bindings["sin"]), value_type(x).dtype
    ends = (bindings["even_end"], bindings["odd_end"])
    check(bindings["dim"] % 3 == 2, x, "the pairs must be slices of the last axis")
    check(min(ends) >= width, x, "the pairs must be those of all elements")
    check(not halves or bindings["half"] == width // 2, x, "the tables must be cut in the middle")
    check(value_type(node).dtype == dtype, node, "the result must have the dtype of x")
    total = operand(node) if node.target is aten.to.dtype else node
    terms = {value_type(term).dtype for term in total.all_input_nodes}
    check(len(terms) == 1, node, "both products must have the same dtype")
    return _rotation(node, ROPE_PAIRS, x, bindings, halves, terms != {dtype})


def _check_tables(x: fx.Node, cos: fx.Node, sin: fx.Node) -> int:
    """Check heads and their tables, and return the width of the heads."""
    shape = value_type(x).shape
    width = shape[-1]
    check(
        len(shape) == 3 and isinstance(width, int),
        x,
        f"x must have shape [heads, T, width], got {shape}",
    )
    assert isinstance(width, int)
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
    return width


def _of_whole_heads(node: fx.Node, bindings: Bindings) -> fx.Node:
    x = bindings["x"]
    shape = value_type(x).shape
    last = bindings["dim"] == len(shape) - 1 == 2 and value_type(node).shape == shape
    check(
        last and bindings["end"] >= min(END, int(shape[-1])),
        node,
        "it must keep the other elements",
    )
    if "halves" not in bindings:
        return _rotation(node, ROPE, x, bindings)
    return _rotation(node, ROPE_PAIRS, x, bindings, bindings["halves"], bindings["wide"])


def _rotation(node: fx.Node, op: Any, x: fx.Node, bindings: Bindings, *options: bool) -> fx.Node:
    """Insert a rotation between two transposes, since the op takes tokens first."""
    tokens_first = insert(node, aten.transpose.int, x, 0, 1)
    rotated = insert(node, op, tokens_first, bindings["cos"], bindings["sin"], *options)
    return insert(node, aten.transpose.int, rotated, 0, 1)
