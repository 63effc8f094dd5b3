"""Small hand-written graphs, for structures that no real model has and passes must refuse."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

from tpcompile.errors import PassError
from tpcompile.ir.checker import Checker
from tpcompile.ir.info import GraphInfo
from tpcompile.ir.meta import Origin, Parameter, new_parameter
from tpcompile.ir.ops import ATTENTION, LINEAR, ROTARY
from tpcompile.ir.recipe import Tensor
from tpcompile.ir.types import Dim, ValueType
from tpcompile.passes import Pass, Report

aten = torch.ops.aten


class GraphBuilder:
    """Builder that adds nodes one by one and infers each type from the operands."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._root = nn.Module()
        self._checker = Checker()

    def input(self, name: str, *shape: Dim, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["type"] = ValueType(shape, dtype)
        return node

    def parameter(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        parameter = Parameter.replicated(Tensor(name, shape), dtype, ranks=1)
        origin = Origin(name)
        return new_parameter(self.graph, name.replace(".", "_"), parameter, origin, self._root)

    def call(
        self, target: Any, *args: Any, kind: ValueType | None = None, **kwargs: Any
    ) -> fx.Node:
        """Add a call; `kind` is its type if the op has no rule."""
        name = str(target).split(".")[1]
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["type"] = kind or self._checker.infer(node)
        return node

    def linear(self, x: fx.Node, name: str, rows: int, columns: int, bias: bool = False) -> fx.Node:
        weight = self.parameter(f"{name}.weight", rows, columns)
        added = [self.parameter(f"{name}.bias", rows)] if bias else []
        return self.call(LINEAR, x, weight, *added)

    def tables(self, width: int) -> tuple[fx.Node, fx.Node]:
        """Add cos and sin of the model's rotary module."""
        positions = self.input("positions", "T", dtype=torch.int64)
        self._root.add_module(ROTARY, nn.Module())
        tables = self.graph.call_module(ROTARY, (positions, width, torch.float32))
        tables.meta["type"] = self._checker.infer(tables)
        return self.part(tables, 0), self.part(tables, 1)

    def part(self, several: fx.Node, place: int) -> fx.Node:
        """Add one of several results."""
        node = self.graph.call_function(operator.getitem, (several, place))
        node.meta["type"] = self._checker.infer(node)
        return node

    def heads(self, features: fx.Node, width: int) -> fx.Node:
        return self.call(aten.unflatten.int, features, 1, [-1, width])

    def attention(self, q: fx.Node, k: fx.Node, v: fx.Node) -> fx.Node:
        starts = self.input("starts", "S", dtype=torch.int64)
        return self.call(ATTENTION, q, k, v, starts, 0.25, None, 0)

    def done(self, result: fx.Node) -> fx.GraphModule:
        kind = result.meta["type"]
        assert isinstance(kind, ValueType)
        self.graph.output(result)
        gm = fx.GraphModule(self._root, self.graph)
        gm.meta["tpcompile"] = GraphInfo("by hand", tp=1, outputs=(kind,))
        return gm


def attention_graph(
    *,
    queries: int = 4,
    keys: int = 2,
    width: int = 8,
    biased: str = "",
    key_input: str = "x",
    tied: bool = False,
) -> fx.GraphModule:
    """Return a single attention with its four projections.

    `biased` names the projections with a bias (`"qk"`); `key_input` is the input of the key
    projection; `tied` gives keys and values one weight.
    """
    builder = GraphBuilder()
    inputs = {name: builder.input(name, "T", 16) for name in dict.fromkeys(("x", key_input))}
    q = builder.linear(inputs["x"], "q", queries * width, 16, bias="q" in biased)
    k = builder.linear(inputs[key_input], "k", keys * width, 16, bias="k" in biased)
    if tied:
        v = builder.call(LINEAR, inputs["x"], k.args[1])
    else:
        v = builder.linear(inputs["x"], "v", keys * width, 16, bias="v" in biased)
    mixed = builder.attention(*(builder.heads(features, width) for features in (q, k, v)))
    merged = builder.call(aten.flatten.using_ints, mixed, 1, 2)
    return builder.done(builder.linear(merged, "o", 16, queries * width))


def refusal(current: Pass, gm: fx.GraphModule) -> str:
    """Return the error of a required pass that does not match the graph."""
    with pytest.raises(PassError) as refused:
        current.apply(gm)
    return str(refused.value)


def nearest(report: Report) -> str:
    """Return why an optional pass did not match its nearest candidate."""
    assert report.matches == 0
    assert report.nearest is not None
    return str(report.nearest)
