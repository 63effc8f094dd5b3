"""Pass `fuse-experts`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ADD_RESIDUAL, EXPERT_TERMS, NORM_EXPERTS, SHARED_EXPERT
from tpcompile.rewriting.pattern import check
from tpcompile.rewriting.rewrite import (
    Report,
    calls,
    fuse_at,
    fuse_call,
    fuse_calls,
    insert,
    replace,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseExperts:
    """Fuse the norm into the experts, and their sums with the shared expert and the residual.

    %n = tpc.rms_norm(%x, %g)
    %e = tpc.experts(%n, %scores, %ids, …)     →     %e = tpc.norm_experts(%x, %g, %scores, …)

    %m = sigmoid(%gate) * linear(%h, %w)
    %t = %e + %m                               →     %t = tpc.shared_expert(%e, %h, %w, %gate)

    %y = %x + %t                               →     %y = tpc.add_residual(%t, %x)
    """

    name: ClassVar[str] = "fuse-experts"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = fuse_calls(gm, NORM_EXPERTS)
        for fuse in (partial(fuse_call, SHARED_EXPERT), _add_residual):
            sites = [node for node in calls(gm, aten.add.Tensor) if _terms_of(node) is not None]
            next_report = fuse_at(gm, [(node, partial(fuse, gm.graph, node)) for node in sites])
            report.matches += next_report.matches
        return report


def _terms_of(added: fx.Node) -> fx.Node | None:
    """Return the results of experts that a node adds to another value."""
    return next((value for value in added.all_input_nodes if value.target in EXPERT_TERMS), None)


def _add_residual(graph: fx.Graph, added: fx.Node) -> None:
    terms = _terms_of(added)
    assert terms is not None
    values = [value for value in added.all_input_nodes if value is not terms]
    alone = len(values) == 1 and len(terms.users) == 1
    check(alone, added, "it must be the only reader of the experts, and add another value to them")
    check(value_type(added) == value_type(terms), added, "the results of experts are not whole")
    with graph.inserting_before(added):
        new = insert(added, ADD_RESIDUAL, terms, values[0])
    replace(added, new)
    graph.erase_node(added)
