"""The text form of a graph: one line per node, for people. The grammar is in docs/ir.md."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tpcompile.ir.info import info_of
from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.meta import origin_of, parameter_of
from tpcompile.ir.ops import op_name, spec_of
from tpcompile.ir.types import AnyType, SymbolType, ValueType, dtype_name


def format_graph(gm: fx.GraphModule, rank: int | None = None) -> str:
    """Format a graph with one line per node, grouped by layer; for one rank if `rank` is given."""
    info = info_of(gm)
    whose = f"tp={info.tp}" if rank is None else f"rank {rank} of {info.tp}"
    return "\n".join([f"graph {info.name} ({whose})", *_lines(gm.graph, rank)]) + "\n"


def _lines(graph: fx.Graph, rank: int | None) -> Iterator[str]:
    section: object = "none yet"
    for node in graph.nodes:
        layer = origin_of(node).layer if node.op not in ("placeholder", "output") else node.op
        if layer != section:
            section = layer
            yield {"placeholder": "inputs", "output": "result"}.get(
                str(layer), "outside of the layers" if layer is None else f"layer {layer}"
            )
        yield "  " + format_node(node, rank)


def format_node(node: fx.Node, rank: int | None = None) -> str:
    """Format a node as `%name = op(operands) : type  # origin`."""
    kind = format_type(node.meta["type"], rank) if "type" in node.meta else "?"
    origin = str(origin_of(node))
    comment = f"  # {origin}" if origin else ""
    if node.op == "placeholder":
        return f"%{node.name} = input : {kind}"
    if node.op == "output":
        return f"return {_operand(node.args[0])}"
    if node.op == "get_attr":
        source = parameter_of(node).describe(rank) if "parameter" in node.meta else "?"
        return f"%{node.name} = param({source}) : {kind}"
    return f"%{node.name} = {_expression(node)} : {kind}{comment}"


def format_type(kind: AnyType, rank: int | None = None) -> str:
    if isinstance(kind, SymbolType):
        return str(kind)
    if isinstance(kind, tuple):
        return "(" + ", ".join(format_type(part, rank) for part in kind) + ")"
    if rank is not None:
        extents = ", ".join(map(str, kind.local_shape(rank)))
        return f"{dtype_name(kind.dtype)}[{extents}] {kind.placed_as}"
    shape = ", ".join(_extent(kind, dim) for dim in range(kind.dims))
    return f"{dtype_name(kind.dtype)}[{shape}] {kind.placed_as}"


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
        return f"{_operand(node.args[0])}[{node.args[1]}]"
    return f"{op_name(node)}({_operands(node)})"


def _operands(node: fx.Node) -> str:
    spec = spec_of(node)
    parts = [_operand(arg) for arg in node.args]
    if spec:
        named = zip(spec.argument_names, node.args, strict=False)
        parts = [
            _operand(arg) if _has_node(arg) else f"{name}={_operand(arg)}" for name, arg in named
        ]
    parts += [f"{name}={_operand(arg)}" for name, arg in node.kwargs.items()]
    return ", ".join(parts)


def _has_node(arg: Any) -> bool:
    if isinstance(arg, list | tuple):
        return any(map(_has_node, arg))
    return isinstance(arg, fx.Node)


def _operand(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, list | tuple):
        return "[" + ", ".join(map(_operand, arg)) + "]"
    if isinstance(arg, torch.dtype):
        return dtype_name(arg)
    if arg == sys.maxsize:  # the end of an open-ended slice
        return "max"
    return str(arg)
