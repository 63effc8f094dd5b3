"""Passes with a mistake, registered for a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import fx

from tpcompile.ir.ops import RMS_NORM, SWIGLU
from tpcompile.passes import PASSES, Report
from tpcompile.rewriting.rewrite import calls


@dataclass(frozen=True)
class DropGates:
    """Broken pass that removes a swiglu whose gate is a linear, and leaves it to dead code."""

    name: ClassVar[str] = "drop-gates"

    def apply(self, gm: fx.GraphModule) -> Report:
        for node in calls(gm, SWIGLU):
            node.args = (node.args[0], node.all_input_nodes[1].all_input_nodes[0])
        return Report(matches=len(calls(gm, SWIGLU)))


@dataclass(frozen=True)
class SkipNorm:
    """Broken pass that removes the norms of one layer: a valid graph with wrong numbers."""

    name: ClassVar[str] = "skip-norm"
    layer: int = 1

    def apply(self, gm: fx.GraphModule) -> Report:
        norms = [n for n in calls(gm, RMS_NORM) if n.name.startswith(f"l{self.layer}_")]
        for node in norms:
            node.replace_all_uses_with(node.all_input_nodes[0])
            weight = node.all_input_nodes[1]
            gm.graph.erase_node(node)
            gm.graph.erase_node(weight)
        return Report(matches=len(norms))


@dataclass(frozen=True)
class Divide:
    """Broken pass that raises an error of Python if the graph has a swiglu."""

    name: ClassVar[str] = "divide"

    def apply(self, gm: fx.GraphModule) -> Report:
        return Report(matches=1 // (not calls(gm, SWIGLU)))


BROKEN = (DropGates, SkipNorm, Divide)


def register(patch: pytest.MonkeyPatch) -> None:
    """Register the broken passes until the end of the test."""
    for kind in BROKEN:
        patch.setitem(PASSES._entries, kind.name, kind)
