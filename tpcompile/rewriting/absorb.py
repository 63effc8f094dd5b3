"""Helpers for fusions that absorb nodes: an absorbed value must have no other reader."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import fx

from tpcompile.ir.meta import operand
from tpcompile.ir.ops import LINEAR, RMS_NORM
from tpcompile.rewriting.pattern import check
from tpcompile.rewriting.structure import bias_of, weight_of


class NormedLinear(NamedTuple):
    """The operands of a linear that reads a norm."""

    x: fx.Node
    norm: fx.Node
    eps: float
    weight: fx.Node
    bias: fx.Node | None


def normed_linear(linear: fx.Node) -> NormedLinear:
    """Return the operands of a linear and of the norm that it reads, or raise MissError."""
    check(linear.target is LINEAR, linear, "it is not a linear", 1)
    norm = operand(linear)
    check(norm.target is RMS_NORM, linear, f"its input %{norm.name} is not an RMS norm", 1)
    eps = norm.args[2]
    assert isinstance(eps, float)
    return NormedLinear(operand(norm), operand(norm, 1), eps, weight_of(linear), bias_of(linear))


def way_back(last: fx.Node, first: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes from `last` back along first operands to `first`, both included."""
    node = last
    yield node
    while node is not first:
        node = operand(node)
        yield node


def check_absorbed(inside: Collection[fx.Node], *readers: fx.Node) -> None:
    """Refuse to absorb a value that a node outside `inside` and `readers` also reads."""
    for node in inside:
        for user in node.users:
            check(user in inside or user in readers, node, f"%{user.name} also reads it")
