"""Metadata of nodes: types, origins, parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from tpcompile.ir.format import Component
from tpcompile.ir.layout import FusedLayout, Layout
from tpcompile.ir.recipe import Recipe, Tensor, component_of, describe, shape_of, shard, tensors_of
from tpcompile.ir.types import REPLICATE, AnyType, Placement, ValueType


@dataclass(frozen=True)
class Origin:
    """The place in the user's model that a node comes from."""

    module: str = ""
    file: str = ""
    line: int = 0
    layer: int | None = None

    @property
    def place(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.module, self.place)))


_NOWHERE = Origin()


@dataclass(frozen=True)
class Parameter:
    """A parameter of the graph: its type, the recipe of the whole, and the recipe of each rank."""

    type: ValueType
    whole: Recipe
    shards: tuple[Recipe, ...]

    @staticmethod
    def replicated(whole: Recipe, dtype: torch.dtype, ranks: int) -> Parameter:
        kind = ValueType(shape_of(whole), dtype, format=next(tensors_of(whole)).format)
        return Parameter(kind, whole, (whole,) * ranks)

    def on_ranks(self, ranks: int) -> Parameter:
        """Return the same parameter, replicated on `ranks` ranks."""
        return Parameter(self.type.placed(REPLICATE), self.whole, (self.whole,) * ranks)

    def sharded(self, dim: int, layout: Layout | FusedLayout) -> Parameter:
        """Return the same parameter, sharded along `dim` according to `layout`."""
        shards = tuple(shard(self.whole, dim, layout.intervals(r)) for r in range(layout.ranks))
        return replace(self, type=self.type.sharded(dim, layout), shards=shards)

    def components(self, rank: int) -> Iterator[tuple[Component, Recipe]]:
        """Yield the components of a rank's part, with their recipes."""
        recipe, stored = self.shards[rank], self.type.stored
        for part in stored.components:
            yield part, recipe if stored.plain else component_of(recipe, part)

    def describe(self, rank: int | None = None) -> str:
        return describe(self.whole if rank is None else self.shards[rank])


OUTPUTS = ("logits", "tokens")
"""The names of a graph's results, in order; the second result is optional."""


def operand(node: fx.Node, index: int = 0) -> fx.Node:
    """Return the node at an argument position; for the output node, its first result."""
    argument = node.args[index]
    if node.op == "output" and isinstance(argument, tuple | list):
        argument = argument[0]
    assert isinstance(argument, fx.Node), (
        f"argument {index} of %{node.name} must be a node, got {argument}"
    )
    return argument


def type_of(node: fx.Node) -> AnyType:
    kind: AnyType = node.meta["type"]
    return kind


def value_type(node: fx.Node) -> ValueType:
    kind = node.meta["type"]
    assert isinstance(kind, ValueType), f"%{node.name} must be one tensor, got {kind}"
    return kind


def placement_of(node: fx.Node) -> Placement:
    return value_type(node).placement


def captured_value(node: fx.Node) -> str | None:
    """Return the name of the captured graph's node with this value, if there is one.

    Passes maintain it. A sharded value stands for the whole value that its ranks hold together,
    so every stage can be compared with the captured graph, value by value.
    """
    name: str | None = node.meta.get("value")
    return name


def parameter_of(node: fx.Node) -> Parameter:
    parameter = node.meta["parameter"]
    assert isinstance(parameter, Parameter)
    return parameter


def has_recipe(node: fx.Node) -> bool:
    """Return whether `set_parameter` made a node a parameter."""
    return node.op == "get_attr" and "parameter" in node.meta and "made_of" in node.meta


def origin_of(node: fx.Node) -> Origin:
    origin = node.meta.get("origin", _NOWHERE)
    assert isinstance(origin, Origin)
    return origin


def parameters(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "get_attr")


def set_parameter(node: fx.Node, parameter: Parameter) -> None:
    """Set the parameter of a node, and with it the node's type.

    The node also records the checkpoint tensors of its first parameter, which the checker compares
    with those of later parameters.
    """
    node.meta.setdefault("made_of", tuple(dict.fromkeys(tensors_of(parameter.whole))))
    node.meta["parameter"] = parameter
    node.meta["type"] = parameter.type


def made_of(node: fx.Node) -> tuple[Tensor, ...]:
    """Return the checkpoint tensors from which a parameter was captured, in order."""
    tensors: tuple[Tensor, ...] = node.meta["made_of"]
    return tensors


def new_parameter(
    graph: fx.Graph, name: str, parameter: Parameter, origin: Origin, root: torch.nn.Module
) -> fx.Node:
    """Insert a parameter node at the insertion point, and register the parameter in `root`.

    The module holds the parameter's shape but no data.
    """
    while hasattr(root, name):
        name += "_"
    empty = torch.empty(shape_of(parameter.whole), dtype=parameter.type.dtype, device="meta")
    root.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))
    node = graph.get_attr(name)
    node.meta["origin"] = origin
    set_parameter(node, parameter)
    return node
