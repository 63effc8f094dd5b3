"""What the fusions of a decode step share: what an op takes in, nobody else may read."""

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
    """What a linear and the norm before it are made from, or a miss."""
    check(linear.target is LINEAR, linear, "it is no linear", 1)
    norm = operand(linear)
    check(norm.target is RMS_NORM, linear, f"its input %{norm.name} is no norm", 1)
    eps = norm.args[2]
    assert isinstance(eps, float)
    return NormedLinear(operand(norm), operand(norm, 1), eps, weight_of(linear), bias_of(linear))


def way_back(last: fx.Node, first: fx.Node) -> Iterator[fx.Node]:
    """From a node along first operands to another, both included."""
    node = last
    yield node
    while node is not first:
        node = operand(node)
        yield node


def check_absorbed(inside: Collection[fx.Node], *readers: fx.Node) -> None:
    """Refuse to take in a value that others than `readers`, and what is inside, read too."""
    for node in inside:
        for user in node.users:
            check(user in inside or user in readers, node, f"%{user.name} reads it too")
