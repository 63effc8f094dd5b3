"""The printer of graphs: a header, then one line per node."""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.info import info_of
from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.meta import Parameter, origin_of, parameter_of
from tpcompile.ir.ops import op_name, spec_of
from tpcompile.ir.text.header import header_lines, names_of_layouts
from tpcompile.ir.text.layouts import LayoutNames
from tpcompile.ir.text.recipes import written_recipe
from tpcompile.ir.text.words import one_line, quoted
from tpcompile.ir.types import AnyType, Shard, SymbolType, ValueType

INPUTS, RESULT, OUTSIDE = "inputs", "result", "outside of the layers"
"""The names of sections; those of layers are numbered."""


def format_graph(
    gm: fx.GraphModule,
    rank: int | None = None,
    *,
    layer: int | None = None,
    origins: bool = True,
) -> str:
    """Format a graph with one line per node, grouped by layer.

    The text of all ranks and layers can be parsed. `rank` and `layer` select parts to look at.
    """
    info = info_of(gm)
    if rank is not None or layer is not None:
        nodes = [n for n in gm.graph.nodes if layer is None or _is_in(n, layer)]
        part = f"rank {rank} of {info.tp}" if rank is not None else f"layer {layer}, tp={info.tp}"
        selection = part if rank is None or layer is None else f"{part}, layer {layer}"
        lines = _lines(nodes, Printer(rank=rank, origins=origins))
        return "\n".join([f"graph {quoted(info.name)} ({selection})", *lines]) + "\n"
    kinds = [node.meta["type"] for node in gm.graph.nodes if "type" in node.meta]
    names = names_of_layouts(info, [*kinds, *info.outputs])
    lines = _lines(gm.graph.nodes, Printer(names=names, origins=origins))
    results = ", ".join(format_type(kind, names=names) for kind in info.outputs)
    return "\n".join([*header_lines(info, names), *lines]) + f" : {results}\n"


def _is_in(node: fx.Node, layer: int) -> bool:
    return node.op not in ("placeholder", "output") and origin_of(node).layer == layer


def _lines(nodes: Iterable[fx.Node], printer: Printer) -> Iterator[str]:
    section = ""
    for node in nodes:
        next_section = section_of(node)
        if next_section != section:
            section = next_section
            yield section
        yield "  " + printer.node(node)


def section_of(node: fx.Node) -> str:
    """Return the name of the section with a node."""
    if node.op in ("placeholder", "output"):
        return INPUTS if node.op == "placeholder" else RESULT
    layer = origin_of(node).layer
    return OUTSIDE if layer is None else f"layer {layer}"


def format_node(node: fx.Node, rank: int | None = None) -> str:
    """Format a node as `%name = op(operands) : type  # origin`."""
    return Printer(rank=rank).node(node)


@dataclass(frozen=True)
class Printer:
    """A printer of nodes, for all ranks or one, with the names of the graph's layouts or of axes.

    Lines that name layouts can be parsed.
    """

    rank: int | None = None
    names: LayoutNames | None = None
    origins: bool = True

    def node(self, node: fx.Node) -> str:
        kind = format_type(node.meta["type"], self.rank, self.names) if "type" in node.meta else "?"
        if node.op == "placeholder":
            return f"%{node.name} = input : {kind}"
        if node.op == "output":
            return f"return {written_operand(node.args[0])}"
        if node.op == "get_attr":
            return f"%{node.name} = param({self._recipe(node)}) : {kind}"
        origin = one_line(str(origin_of(node))) if self.origins else ""
        comment = f"  # {origin}" if origin else ""
        return f"%{node.name} = {_expression(node)} : {kind}{comment}"

    def _recipe(self, node: fx.Node) -> str:
        if "parameter" not in node.meta:
            return "?"
        parameter = parameter_of(node)
        if self.names is None:
            return parameter.describe(self.rank)
        shape = parameter.type.shape
        written = written_recipe(parameter.whole, shape)
        if parameter.shards == shards_of(parameter):
            return written
        shards = (f"rank {r}: {written_recipe(s, shape)}" for r, s in enumerate(parameter.shards))
        return "; ".join((written, *shards))


def shards_of(parameter: Parameter) -> tuple[Any, ...]:
    """Return the recipes of the ranks that follow from a parameter's type."""
    placement = parameter.type.placement
    ranks = len(parameter.shards)
    if not isinstance(placement, Shard) or isinstance(placement.layout, TokenLayout):
        return (parameter.whole,) * ranks
    return parameter.sharded(placement.dim, placement.layout).shards


def format_type(kind: AnyType, rank: int | None = None, names: LayoutNames | None = None) -> str:
    if isinstance(kind, SymbolType):
        return str(kind)
    if isinstance(kind, tuple):
        return "(" + ", ".join(format_type(part, rank, names) for part in kind) + ")"
    if rank is not None:
        extents = ", ".join(map(str, kind.local_shape(rank)))
        return f"{dtype_name(kind.dtype)}[{extents}] {_placed(kind, names)}"
    return _global_type(kind) if names is None else f"{_global_shape(kind)} {_placed(kind, names)}"


@lru_cache(maxsize=4096)
def _global_type(kind: ValueType) -> str:
    """Format a type without names of layouts. The layers of a model have the same types."""
    return f"{_global_shape(kind)} {_placed(kind, None)}"


def _global_shape(kind: ValueType) -> str:
    extents = ", ".join(_extent(kind, dim) for dim in range(kind.dims))
    return f"{dtype_name(kind.dtype)}[{extents}]"


def _placed(kind: ValueType, names: LayoutNames | None) -> str:
    if names is None or not isinstance(kind.placement, Shard):
        return kind.placed_as
    return kind.described(f"Shard({kind.placement.dim}, {names.written(kind.placement.layout)})")


def _extent(kind: ValueType, dim: int) -> str:
    """Format the global extent, followed by the ranks' extents if the dimension is sharded."""
    whole = str(kind.shape[dim])
    layout = kind.layout_of(dim)
    if layout is None:
        return whole
    if isinstance(layout, TokenLayout):
        return f"{whole}:{layout.ranks}×{whole}/{layout.ranks}"
    extents = [layout.extent(rank) for rank in range(layout.ranks)]
    if len(set(extents)) == 1:
        return f"{whole}:{len(extents)}×{extents[0]}"
    return f"{whole}:{'|'.join(map(str, extents))}"


def _expression(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{written_operand(node.args[0])}[{node.args[1]}]"
    return f"{op_name(node)}({_operands(node)})"


def _operands(node: fx.Node) -> str:
    spec = spec_of(node)
    parts = [written_operand(arg) for arg in node.args]
    if spec:
        named = zip(spec.argument_names, node.args, strict=False)
        parts = [
            written_operand(arg) if _has_node(arg) else f"{name}={written_operand(arg)}"
            for name, arg in named
        ]
    parts += [f"{name}={written_operand(arg)}" for name, arg in node.kwargs.items()]
    return ", ".join(parts)


def _has_node(arg: Any) -> bool:
    if isinstance(arg, list | tuple):
        return any(map(_has_node, arg))
    return isinstance(arg, fx.Node)


def written_operand(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, list | tuple):
        return "[" + ", ".join(map(written_operand, arg)) + "]"
    if isinstance(arg, torch.dtype):
        return dtype_name(arg)
    if isinstance(arg, str):
        return json.dumps(arg)
    if arg == sys.maxsize:  # the end of an open-ended slice
        return "max"
    return str(arg)
