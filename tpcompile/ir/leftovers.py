"""What the fusions of a decode step left: nodes that no instruction of a program stands for.

A fusion that refuses a node keeps its reason there, so that who cannot go on may say it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tpcompile.errors import UnsupportedError
from tpcompile.ir.meta import operand, origin_of
from tpcompile.ir.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_RESIDUAL,
    ARGMAX,
    ATTENTION_REDUCE,
    EMBEDDING,
    LINEAR,
    LINEAR_RESIDUAL,
    NORM_GATE_UP_SWIGLU,
    NORM_LINEAR,
    NORM_QKV_ROPE_APPEND,
    PARTIAL_ATTENTION,
    ROTARY,
    VOCAB_EMBEDDING,
)
from tpcompile.ir.text import format_node

aten = torch.ops.aten

_REFUSALS = "refusals"


@dataclass(frozen=True)
class Leftover:
    """A node that should have become part of an instruction group, and why it did not."""

    node: fx.Node
    reason: str
    refused: bool = True
    """Whether a fusion looked at it; if none did, the passes were not those of a decode step."""

    @property
    def hint(self) -> str:
        if self.refused:
            return "The model does this in another way than those that tpcompile knows"
        return "Lower what decode_pipeline (-p decode) makes of the model"

    def __str__(self) -> str:
        return f"{format_node(self.node)}: {self.reason}"


def keep_refusal(node: fx.Node, depth: int, reason: str) -> None:
    """Note why a fusion refused a node; `depth` says how near it came."""
    node.meta[_REFUSALS] = (*_refusals(node), (depth, reason))


def pass_refusals_on(old: fx.Node, new: fx.Node) -> None:
    """What was said of a node holds for the one that stands in its place."""
    if _refusals(old):
        new.meta[_REFUSALS] = (*_refusals(old), *_refusals(new))


def leftovers(gm: fx.GraphModule) -> list[Leftover]:
    """The nodes of a decode graph that are no instruction group, in order; of a good one none."""
    found = {
        node: None
        for node in gm.graph.nodes
        if node.op.startswith("call") and not _is_consumed(node)
    }
    return [_leftover(node, found) for node in found]


def verify_nothing_left(gm: fx.GraphModule) -> None:
    """Raise `UnsupportedError` if a graph has nodes that no instruction stands for."""
    found = leftovers(gm)
    if not found:
        return
    first, *others = found
    more = f" ({len(others)} more nodes are left)" if others else ""
    raise UnsupportedError(
        f"%{first.node.name} belongs to no instruction of a decode step: {first.reason}{more}",
        where=str(origin_of(first.node)),
        got=format_node(first.node),
        expected="a graph whose nodes are instruction groups, as decode_pipeline makes them",
        hint=first.hint,
    )


def _refusals(node: fx.Node) -> tuple[tuple[int, str], ...]:
    found: tuple[tuple[int, str], ...] = node.meta.get(_REFUSALS, ())
    return found


def _leftover(node: fx.Node, left: dict[fx.Node, None]) -> Leftover:
    """With the refusal that came nearest to a match, of the node itself or of what it leads to: a
    fusion looks for its last node, and takes in those before."""
    ahead, seen = [node], {node}
    said: list[tuple[int, str]] = []
    for current in ahead:
        said += _refusals(current)
        new = [user for user in current.users if user in left and user not in seen]
        ahead += new
        seen |= set(new)
    if not said:
        return Leftover(node, "no fusion of a decode step looked at it", refused=False)
    _, nearest = max(reversed(said), key=lambda refusal: refusal[0])  # of several the furthest on
    return Leftover(node, nearest)


def _is_consumed(node: fx.Node) -> bool:
    rule = _CONSUMED.get(node.target)
    return rule is not None and rule(node)


def _always(node: fx.Node) -> bool:
    return True


def _reads(*targets: Any) -> Callable[[fx.Node], bool]:
    return lambda node: operand(node).target in targets


def _read_by(*targets: Any) -> Callable[[fx.Node], bool]:
    return lambda node: all(user.op == "output" or user.target in targets for user in node.users)


_CONSUMED: dict[Any, Callable[[fx.Node], bool]] = {
    ROTARY: _always,
    operator.getitem: _reads(ROTARY, PARTIAL_ATTENTION),
    EMBEDDING: _always,
    VOCAB_EMBEDDING: _always,
    ALL_REDUCE: _reads(VOCAB_EMBEDDING),
    NORM_QKV_ROPE_APPEND: _always,
    PARTIAL_ATTENTION: _always,
    ATTENTION_REDUCE: _always,
    aten.flatten.using_ints: _reads(ATTENTION_REDUCE),
    LINEAR: _read_by(ALL_REDUCE_RESIDUAL),
    LINEAR_RESIDUAL: _always,
    ALL_REDUCE_RESIDUAL: _always,
    NORM_GATE_UP_SWIGLU: _always,
    aten.index_select.default: _read_by(NORM_LINEAR),
    NORM_LINEAR: _read_by(ARGMAX, ALL_GATHER),
    ALL_GATHER: _read_by(),
    ARGMAX: _read_by(),
}
"""What is an instruction group, or part of one, where its neighbours are what they should be."""
