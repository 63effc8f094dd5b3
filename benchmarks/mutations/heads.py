"""Mistakes in heads: cut in two, or separated from the KV heads that they read."""

from __future__ import annotations

from torch import fx

from benchmarks.mutations.draft import Draft, UnfitError, layer_of, relayout, with_parts
from benchmarks.mutations.layouts import alike, moved_boundary, part_of, with_run
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import value_type


def head_split(draft: Draft) -> str:
    """Move a boundary between ranks into the middle of a query head, in the whole layer."""
    node = draft.pick(draft.split_parameters(axis="q_heads"), "query heads")
    old = part_of(node, "q_heads")
    halves = Layout(
        old.axis,
        old.units * 2,
        old.grain // 2,
        tuple(tuple((2 * a, 2 * b) for a, b in part) for part in old.parts),
    )
    new = draft.pick(moved_boundary(halves), "boundary")
    for member in alike(draft, "q_heads", node):
        relayout(member, "q_heads", new)
    return f"layer {layer_of(node)}: half heads {new.parts}"


def kv_by_habit(draft: Draft) -> str:
    """Choose the KV heads of a rank by `rank // k` instead of by its query heads."""
    node = draft.pick(draft.split_parameters(axis="kv_heads"), "KV heads")
    keys = part_of(node, "kv_heads")
    runs = tuple(
        ((first := rank * keys.units // keys.ranks, max(first + 1, last)),)
        for rank in range(keys.ranks)
        for last in [(rank + 1) * keys.units // keys.ranks]
    )
    new = with_parts(keys, runs)
    return _keep_kv(draft, node, new)


def other_kv_heads(draft: Draft) -> str:
    """Give some rank a KV head that it does not read instead of one that it reads."""
    node = draft.pick(draft.split_parameters(axis="kv_heads"), "KV heads")
    keys = part_of(node, "kv_heads")
    rank = draft.dice.randrange(keys.ranks)
    start, stop = keys.parts[rank][0]
    moved = [(start + step, stop + step) for step in (-1, 1)]
    inside = [run for run in moved if run[0] >= 0 and run[1] <= keys.units]
    new = with_parts(keys, with_run(keys, rank, draft.pick(inside, "room beside its KV heads")))
    return _keep_kv(draft, node, new)


def _keep_kv(draft: Draft, node: fx.Node, new: Layout) -> str:
    attention = next(n for n in draft.attentions() if layer_of(n) == layer_of(node))
    queries = value_type(attention).layout_of(1)
    assert isinstance(queries, Layout)
    group = queries.units // new.units
    if all(
        {h // group for h in queries.units_of(r)} <= set(new.units_of(r)) for r in range(new.ranks)
    ):
        raise UnfitError("every rank still has the KV heads that it reads")
    for member in alike(draft, "kv_heads", node):
        relayout(member, "kv_heads", new)
    return f"layer {layer_of(node)}: KV heads {new.parts}"
