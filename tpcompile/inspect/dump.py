"""The JSON form of a graph: nodes with types and origins, parameters with recipes."""

from __future__ import annotations

import operator
from itertools import product
from typing import Any

import torch
from torch import fx

from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.info import info_of
from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.meta import origin_of, parameter_of
from tpcompile.ir.ops import op_name, spec_of
from tpcompile.ir.pieces import Piece, pieces
from tpcompile.ir.types import AnyType, Placement, Shard, SymbolType

_OPS = {"placeholder": "input", "get_attr": "param", "output": "return"}


def graph_json(
    gm: fx.GraphModule, rank: int | None = None, layer: int | None = None
) -> dict[str, Any]:
    """Return the graph as data for `json.dumps`, with shapes and recipes of one rank or of all.

    `layer` selects the nodes of one layer.
    """
    info = info_of(gm)
    ranks = list(range(info.tp)) if rank is None else [rank]
    nodes = [n for n in gm.graph.nodes if layer is None or origin_of(n).layer == layer]
    return {
        "name": info.name,
        "tp": info.tp,
        "ranks": ranks,
        "nodes": [_node(node, ranks) for node in nodes],
        "parameters": [parameter_json(node, ranks) for node in nodes if node.op == "get_attr"],
    }


def _node(node: fx.Node, ranks: list[int]) -> dict[str, Any]:
    origin = origin_of(node)
    return {
        "name": node.name,
        "op": _op(node),
        "operands": _operands(node),
        "type": type_json(node.meta["type"], ranks) if "type" in node.meta else None,
        "origin": {
            "module": origin.module,
            "file": origin.file.rpartition("/")[2],
            "line": origin.line,
            "layer": origin.layer,
        },
    }


def _op(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "item"
    return _OPS.get(node.op) or op_name(node)


def _operands(node: fx.Node) -> dict[str, Any]:
    """Return the operands by name. `%name` refers to the value of a node."""
    if node.op == "get_attr":
        return {}
    spec = spec_of(node)
    names = spec.argument_names if spec else tuple(map(str, range(len(node.args))))
    if node.target is operator.getitem:
        names = ("value", "index")
    elif node.op == "output":
        names = ("result",)
    operands = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: _operand(value) for name, value in operands.items()}


def _operand(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return [_operand(item) for item in value]
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return value if isinstance(value, bool | int | float | None) else str(value)


def type_json(kind: AnyType, ranks: list[int]) -> Any:
    """Return the type as an object (tensor or symbol), or as a list (several tensors)."""
    if isinstance(kind, SymbolType):
        return {"symbol": kind.symbol}
    if isinstance(kind, tuple):
        return [type_json(part, ranks) for part in kind]
    return {
        "shape": list(kind.shape),
        "dtype": dtype_name(kind.dtype),
        "placement": _placement(kind.placement, ranks),
        "local_shapes": [list(kind.local_shape(rank)) for rank in ranks],
    }


def _placement(placement: Placement, ranks: list[int]) -> dict[str, Any]:
    if not isinstance(placement, Shard):
        return {"kind": type(placement).__name__}
    layout = placement.layout
    entry = {"kind": "Shard", "dim": placement.dim, "axis": layout.axis}
    if not isinstance(layout, TokenLayout):
        entry["intervals"] = [[list(i) for i in layout.intervals(rank)] for rank in ranks]
    return entry


def parameter_json(node: fx.Node, ranks: list[int]) -> dict[str, Any]:
    parameter = parameter_of(node)
    kind = parameter.type
    return {
        "node": node.name,
        "recipe": parameter.describe(),
        "shape": list(kind.shape),
        "dtype": dtype_name(kind.dtype),
        "ranks": [
            {
                "rank": rank,
                "shape": list(kind.local_shape(rank)),
                "recipe": parameter.describe(rank),
                "reads": [
                    read
                    for part, recipe in parameter.components(rank)
                    for piece in pieces(recipe)
                    for read in reads(piece, part.dtype.itemsize)
                ],
            }
            for rank in ranks
        ],
    }


def reads(piece: Piece, itemsize: int) -> list[dict[str, Any]]:
    """Return the byte ranges of a checkpoint tensor that a piece reads.

    Each entry is `count` runs of `bytes` bytes. The first run begins `start` bytes after the
    start of the tensor, and each further run begins `stride` bytes after the one before. A slice
    of columns has one run per row, so the runs are not listed one by one.
    """
    strides = [itemsize] * len(piece.shape)
    for dim in range(len(piece.shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * piece.shape[dim + 1]
    inner = len(piece.shape) - 1
    while inner and piece.source[inner] == (range(piece.shape[inner]),):
        inner -= 1
    spans = [(run[0] * strides[inner], len(run)) for run in _unit_steps(piece.source[inner])]
    outer = [[i for run in runs for i in run] for runs in piece.source[: max(inner - 1, 0)]]
    repeats = piece.source[inner - 1] if inner else (range(1),)
    entries = []
    for index in product(*outer):
        base = sum(i * stride for i, stride in zip(index, strides, strict=False))
        for repeat, (offset, length) in product(repeats, spans):
            step = strides[inner - 1] if inner else 0
            entries.append(
                {
                    "tensor": piece.tensor,
                    "start": base + repeat[0] * step + offset,
                    "bytes": length * strides[inner],
                    "count": len(repeat),
                    "stride": step * repeat.step if len(repeat) > 1 else 0,
                }
            )
    return entries


def _unit_steps(runs: tuple[range, ...]) -> list[range]:
    """Split runs with a step other than 1 into single indices."""
    return [
        part
        for run in runs
        for part in ([run] if run.step == 1 else [range(i, i + 1) for i in run])
    ]
