"""The residual: what it begins with, and what each half of a layer adds to it.

There are two buffers for it. What is added to one is written to the other, so that nobody who
still norms the old values meets new ones.
"""

from __future__ import annotations

import torch
from torch import fx

from tpcompile.errors import UsageError
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ATTENTION_REDUCE
from tpcompile.ir.types import Partial
from tpcompile.vm.groups.arithmetic import leaves_of
from tpcompile.vm.groups import AllReduce, Embed, LinearResidual, LinearTerms
from tpcompile.vm.groups.embed import EmbedOperands
from tpcompile.vm.groups.project import ProjectOperands, Site, SumOperands
from tpcompile.vm.lowering.building import Building, layer_of, width_of
from tpcompile.vm.program.instruction import NONE, Range


def embedding(to: Building, node: fx.Node) -> None:
    """Every rank the rows that it has; the sum of them comes behind, where there are several."""
    weight, ids = node.args[:2]
    assert isinstance(weight, fx.Node) and isinstance(ids, fx.Node)
    kind = value_type(weight)
    summed = kind.layout_of(0) is not None
    out = _terms(to, Site.EMBEDDING, node) if summed else _residual(to, node, None)
    to.put(node, out)
    for rank in range(to.ranks):
        rows = kind.local_shape(rank)[0]
        assert isinstance(rows, int)
        at = EmbedOperands(
            rank=rank,
            layer=NONE,
            tokens=to.where(ids, rank),
            table=to.where(weight, rank),
            out=out + rank,
            batch=to.plan.batch,
            first=to.bound(node, rank).get("first_row", 0),
            rows=rows,
            item=kind.dtype.itemsize,
            summed=summed,
        )
        to.instructions += [Embed(at, columns) for columns in to.plan.sums(width_of(node))]


def linear_residual(to: Building, node: fx.Node) -> None:
    """A projection that one rank does alone; of several splits the sum comes behind."""
    bound = to.bound(node)
    if to.plan.column_splits > 1:
        terms = _make_terms(to, node, bound["x"], bound["weight"])
        _reduce(to, node, terms, bound["residual"], bound["bias"])
        return
    out = _residual(to, node, bound["residual"])
    to.put(node, out)
    for rank in range(to.ranks):
        at = _project_operands(to, node, rank, out + rank)
        to.instructions += [LinearResidual(at, rows) for rows in to.plan.blocks(width_of(node))]


def linear_terms(to: Building, node: fx.Node) -> None:
    """A row-parallel linear: each rank's terms of a sum."""
    x, weight, *bias = node.args
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    if not isinstance(value_type(node).placement, Partial) or any(bias):
        raise to.refusal(node, "a linear that is fused with nothing")
    to.put(node, _make_terms(to, node, x, weight))


def all_reduce(to: Building, node: fx.Node) -> None:
    """The sum of all ranks' rows of the embedding."""
    (terms,) = node.all_input_nodes
    _reduce(to, node, to.where(terms, 0), None, None)


def all_reduce_residual(to: Building, node: fx.Node) -> None:
    """The sum of all ranks' terms, added to the residual."""
    bound = to.bound(node)
    _reduce(to, node, to.where(bound["partial"], 0), bound["residual"], bound["bias"])


def _make_terms(to: Building, node: fx.Node, x: fx.Node, weight: fx.Node) -> int:
    site = _site(x)
    terms = _terms(to, site, node)
    for rank in range(to.ranks):
        at = _terms_operands(to, node, rank, x, weight, terms + rank)
        for slot, columns in enumerate(_columns(to, at)):
            leaves = at.leaves // to.plan.column_splits
            to.instructions += [
                LinearTerms(at, rows, columns, slot, leaves)
                for rows in to.plan.blocks(width_of(node))
            ]
    return terms


def _columns(to: Building, at: ProjectOperands) -> list[Range]:
    """The columns of whole leaves."""
    count = to.plan.column_splits
    if count > at.leaves:
        raise UsageError(
            f"column_splits={count} on {to.ranks} ranks",
            expected=f"at most {at.leaves}, the sums that a rank adds up in any case",
        )
    stops = [_leaf_stop(at, at.leaves // count * (n + 1)) for n in range(count)]
    return [Range(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]


def _leaf_stop(at: ProjectOperands, leaf: int) -> int:
    short, longer = divmod(at.width, at.leaves)
    return leaf * short + min(leaf, longer)


def _terms_operands(
    to: Building, node: fx.Node, rank: int, x: fx.Node, weight: fx.Node, out: int
) -> ProjectOperands:
    width = value_type(weight).local_shape(rank)[1]
    assert isinstance(width, int)
    return ProjectOperands(
        rank=rank,
        layer=layer_of(node),
        site=_site(x),
        x=to.where(x, rank),
        weight=to.where(weight, rank),
        bias=NONE,
        residual=NONE,
        out=out,
        batch=to.plan.batch,
        width=width,
        leaves=leaves_of(to.ranks),
        item=value_type(weight).dtype.itemsize,
    )


def _project_operands(to: Building, node: fx.Node, rank: int, out: int) -> ProjectOperands:
    bound = to.bound(node)
    at = _terms_operands(to, node, rank, bound["x"], bound["weight"], out)
    own = vars(at) | {
        "bias": to.where_if(bound["bias"], rank),
        "residual": to.where(bound["residual"], rank),
    }
    return ProjectOperands(**own)


def _reduce(
    to: Building, node: fx.Node, terms: int, residual: fx.Node | None, bias: fx.Node | None
) -> None:
    out = _residual(to, node, residual)
    to.put(node, out)
    site = Site.EMBEDDING if residual is None else _TERMS_SITE[to.buffers[terms].name]
    slots = 1 if site == Site.EMBEDDING else to.plan.column_splits
    for rank in range(to.ranks):
        at = SumOperands(
            rank=rank,
            layer=layer_of(node),
            site=site,
            terms=terms,
            ranks=to.ranks,
            slots=slots,
            bias=to.where_if(bias, rank),
            residual=to.where_if(residual, rank),
            out=out + rank,
            batch=to.plan.batch,
        )
        to.instructions += [AllReduce(at, columns) for columns in to.plan.sums(width_of(node))]


def _site(x: fx.Node) -> Site:
    """Attention if that is what is projected, seen through views."""
    while x.op == "call_function" and len(x.all_input_nodes) == 1:
        (x,) = x.all_input_nodes
    return Site.ATTENTION if x.target == ATTENTION_REDUCE else Site.MLP


_TERMS_NAME = {Site.ATTENTION: "attention_terms", Site.MLP: "mlp_terms"}
_TERMS_SITE = {name: site for site, name in _TERMS_NAME.items()}


def _terms(to: Building, site: Site, node: fx.Node) -> int:
    """Terms of the two halves of a layer lie apart, so that nobody waits for another rank to
    have read the last ones; the embedding's come before attention, so they lie with the MLP's."""
    rows = to.plan.column_splits * to.plan.batch
    name = _TERMS_NAME.get(site, _TERMS_NAME[Site.MLP])
    return to.alike(name, (rows, width_of(node)), torch.float32)


def _residual(to: Building, node: fx.Node, old: fx.Node | None) -> int:
    """The buffer that does not hold the old values."""
    name = "x0"
    if old is not None and to.buffers[to.where(old, 0)].name == "x0":
        name = "x1"
    return to.alike(name, (to.plan.batch, width_of(node)), value_type(node).dtype)
