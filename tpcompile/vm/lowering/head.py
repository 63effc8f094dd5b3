"""The second half of a layer, and the end of the step."""

from __future__ import annotations

import torch
from torch import fx

from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import value_type
from tpcompile.vm.groups import Argmax, NormGateUpSwiglu, NormLmHead
from tpcompile.vm.groups.head import ArgmaxOperands, HeadOperands
from tpcompile.vm.groups.mlp import GateUpOperands
from tpcompile.vm.lowering.attention import normed
from tpcompile.vm.lowering.building import Building, layer_of
from tpcompile.vm.program.instruction import NONE


def norm_gate_up(to: Building, node: fx.Node) -> None:
    """Blocks of the width of the MLP."""
    bound = to.bound(node)
    columns = to.local_columns(node)
    out = to.declare(
        "swiglu", [(to.plan.batch, width) for width in columns], value_type(node).dtype
    )
    to.put(node, out)
    for rank in range(to.ranks):
        at = GateUpOperands(
            rank=rank,
            layer=layer_of(node),
            normed=normed(to, node, rank),
            weight=to.where(bound["weight"], rank),
            bias=to.where_if(bound["bias"], rank),
            out=out + rank,
            ffn=columns[rank],
            item=value_type(bound["weight"]).dtype.itemsize,
        )
        to.instructions += [NormGateUpSwiglu(at, rows) for rows in to.plan.blocks(columns[rank])]


def norm_head(to: Building, node: fx.Node) -> None:
    """Blocks of the vocabulary; ranks have as many of them each, so that all bests are alike."""
    bound = to.bound(node)
    kind, columns = value_type(node), to.local_columns(node)
    if not isinstance(kind.layout_of(1), Layout | None):
        raise to.refusal(node, "a head whose rows lie on the ranks in parts")
    batch = to.plan.batch
    logits = to.declare("logits", [(batch, width) for width in columns], kind.dtype)
    to.put(node, logits)
    slots = min(len(to.plan.blocks(width)) for width in columns)
    best = to.alike("best_logits", (batch, slots), torch.float32)
    ids = to.alike("best_ids", (batch, slots), torch.int32)
    for rank in range(to.ranks):
        at = HeadOperands(
            rank=rank,
            layer=NONE,
            normed=normed(to, node, rank),
            weight=to.where(bound["weight"], rank),
            bias=to.where_if(bound["bias"], rank),
            logits=logits + rank,
            best=best + rank,
            ids=ids + rank,
            first=_first_row(node, rank),
            item=value_type(bound["weight"]).dtype.itemsize,
        )
        blocks = to.plan.pieces(columns[rank], slots)
        to.instructions += [NormLmHead(at, rows, slot) for slot, rows in enumerate(blocks)]


def _first_row(node: fx.Node, rank: int) -> int:
    layout = value_type(node).layout_of(1)
    return 0 if layout is None else layout.intervals(rank)[0][0]  # type: ignore[union-attr]


def argmax(to: Building, node: fx.Node) -> None:
    """The token, on every rank for itself, of all ranks' bests."""
    (logits,) = node.all_input_nodes
    to.where(logits, 0)  # refuses what is no head
    plan, batch = to.plan, to.plan.batch
    best, ids = to.number("best_logits"), to.number("best_ids")
    numbers = {
        "tokens": to.alike("tokens", (batch,), torch.int32, "state"),
        "positions": to.alike("positions", (batch,), torch.int32, "state"),
        "lengths": to.alike("lengths", (batch,), torch.int32, "state"),
        "finished": to.alike("finished", (batch,), torch.int32, "state"),
        "stops": to.alike("stops", (plan.stops,), torch.int32, "input"),
        "clock": to.alike("clock", (1,), torch.int32, "state"),
        "history": to.alike("history", (plan.steps, batch), torch.int32, "state"),
    }
    to.put(node, numbers["tokens"])
    for rank in range(to.ranks):
        at = ArgmaxOperands(
            rank=rank,
            layer=NONE,
            best=best,
            ids=ids,
            ranks=to.ranks,
            slots=to.buffers[best].shape[1],
            batch=batch,
            most_stops=plan.stops,
            steps=plan.steps,
            **{name: number + rank for name, number in numbers.items()},
        )
        to.instructions.append(Argmax(at))
