"""Pass `select-rows`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, type_of
from tpcompile.ir.ops import (
    ADD_RMS_NORM,
    ALL_REDUCE,
    ELEMENTWISE,
    LINEAR,
    REDISTRIBUTE,
    RMS_NORM,
    SWIGLU,
)
from tpcompile.ir.types import Dim, ValueType
from tpcompile.rewriting.pattern import MissError, check
from tpcompile.rewriting.rewrite import Report, calls, drop_dead, insert, replace

aten = torch.ops.aten

_BY_ROW = frozenset(
    (
        *(LINEAR, RMS_NORM, ADD_RMS_NORM, SWIGLU, ALL_REDUCE, REDISTRIBUTE, operator.getitem),
        *(aten.split_with_sizes.default, aten.unflatten.int, aten.flatten.using_ints),
        *ELEMENTWISE,
    )
)
"""Ops that compute each row of their result from the same row of their operands."""


@dataclass(frozen=True)
class SelectRows:
    """Select the requested rows before the last layer's MLP, not after it.

    %h = %x + %o                            %s = index_select(%x, 0, %rows)
    %m = mlp(norm(%h))                      %t = index_select(%o, 0, %rows)
    %n = norm(%h + %m)                →     %h = %s + %t
    %r = index_select(%n, 0, %rows)         %m = mlp(norm(%h))
    %l = linear(%r, %w)                     %n = norm(%h + %m)
                                            %l = linear(%n, %w)

    The last output projection of attention and the MLP then compute only the requested rows.
    """

    name: ClassVar[str] = "select-rows"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        for select in calls(gm, aten.index_select.default):
            try:
                _hoist(gm.graph, select)
                report.matches += 1
            except MissError as miss:
                report.miss(miss)
        drop_dead(gm.graph)
        return report


def _hoist(graph: fx.Graph, select: fx.Node) -> None:
    """Select rows of the values from which the operand of `select` is computed row by row."""
    source, dim, rows = select.args
    assert isinstance(source, fx.Node) and isinstance(rows, fx.Node)
    check(dim == 0 and rows.op == "placeholder", select, "it does not select rows of the step")
    extent = _rows(source)
    inner = _only_for(graph, select, extent)
    check(any(node.target is LINEAR for node in inner), source, "no linear computes it row by row")
    selected: dict[fx.Node, fx.Node] = {}
    for node in reversed(inner):
        for value in node.all_input_nodes:
            if value in inner or _rows(value) != extent:
                continue
            if value not in selected:
                with graph.inserting_before(node):
                    selected[value] = insert(value, aten.index_select.default, value, 0, rows)
            node.replace_input_with(value, selected[value])
    replace(select, source)


def _only_for(graph: fx.Graph, select: fx.Node, extent: Dim | None) -> dict[fx.Node, None]:
    """Return the nodes, computed row by row, on which only `select` depends; the last one first."""
    nodes: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        readers = node.users and all(user is select or user in nodes for user in node.users)
        if readers and node.target in _BY_ROW and _rows(node) == extent:
            nodes[node] = None
    items = [node for node in nodes if node.target is operator.getitem]
    for item in items:
        if operand(item) not in nodes:
            del nodes[item]
    return nodes


def _rows(node: fx.Node) -> Dim | None:
    """Return the first extent of a value, or of all parts of a value."""
    kind = type_of(node)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    extents = {part.shape[0] for part in kinds if isinstance(part, ValueType) and part.shape}
    return extents.pop() if len(extents) == 1 else None
