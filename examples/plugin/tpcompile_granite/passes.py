"""Two passes, and two pipelines that contain them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand
from tpcompile.ir.ops import ALL_REDUCE, EMBEDDING, VOCAB_EMBEDDING
from tpcompile.passes import Pass, Pipeline, Standard, decoding, graph_pass, pipeline, rewrite
from tpcompile.rewriting.pattern import Bindings, Call, Value, check
from tpcompile.rewriting.rewrite import Report, fuse_each, insert, replace
from tpcompile_granite.ops import SCALED_EMBEDDING

DIV, MUL = torch.ops.aten.div.Tensor, torch.ops.aten.mul.Tensor


@graph_pass
@dataclass(frozen=True)
class DropUnitScales:
    """Remove products with one and divisions by one.

    %b = %a * 1.0       →   %a
    """

    name: ClassVar[str] = "drop-unit-scales"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)

    def apply(self, gm: fx.GraphModule) -> Report:
        """Look for products and for divisions."""
        reports = [rewrite(gm, Call(op, (Value("x"), 1.0)), _operand) for op in (MUL, DIV)]
        return Report(sum(report.matches for report in reports))


def _operand(node: fx.Node, bindings: Bindings) -> fx.Node:
    x: fx.Node = bindings["x"]
    return x


@graph_pass
@dataclass(frozen=True)
class FuseScaledEmbedding:
    """Fuse an embedding and its multiplication by a number, also across a sum over ranks.

    %e = embedding(%weight, %ids)
    %y = %e * 12.0      →   %y = tpc.scaled_embedding(%weight, %ids, 12.0)
    """

    name: ClassVar[str] = "fuse-scaled-embedding"
    after: ClassVar[tuple[str, ...]] = ("canonicalize", "insert-collectives")

    def apply(self, gm: fx.GraphModule) -> Report:
        """Look for a product of an embedding and a number."""
        return fuse_each(gm, MUL, _fuse)


def _fuse(graph: fx.Graph, node: fx.Node) -> None:
    total, scale = operand(node), node.args[1]
    rows = operand(total) if total.target is ALL_REDUCE else total
    check(isinstance(scale, float), node, "the other factor is not a number")
    check(rows.target in (EMBEDDING, VOCAB_EMBEDDING), node, "the product is not of an embedding")
    scaled = insert(rows, SCALED_EMBEDDING, *rows.args[:2], scale)
    if rows is not total:
        scaled = insert(total, ALL_REDUCE, scaled, *total.args[1:])
    replace(node, scaled)


@pipeline
@dataclass(frozen=True)
class Granite(Pipeline):
    """Lower a Granite model: the standard pipeline, with scales removed and fused."""

    name: ClassVar[str] = "granite"

    def passes(self) -> list[Pass]:
        """Return the passes in order."""
        first, *middle, last = Standard().passes()
        return [first, DropUnitScales(), *middle, FuseScaledEmbedding(), last]


@pipeline
@dataclass(frozen=True)
class GraniteDecode(Pipeline):
    """Lower a Granite model to the instruction groups of decode steps."""

    name: ClassVar[str] = "granite-decode"
    spans: int = 1
    """Number of spans into which attention splits a sequence."""

    def passes(self) -> list[Pass]:
        """Return the passes in order."""
        return decoding(Granite().passes(), self.spans)
