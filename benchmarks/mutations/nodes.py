"""Mistakes in the nodes of a sharded layer: norms, biases, sums and splits in the wrong place."""

from __future__ import annotations

import operator
from itertools import pairwise

import torch
from torch import fx

from benchmarks.mutations.draft import Draft, UnfitError, linears_behind, replicate, shard_of, tiled
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import Parameter, operand, parameter_of, set_parameter, value_type
from tpcompile.ir.ops import ALL_REDUCE, LINEAR, REDUCE_SCATTER, RMS_NORM, SWIGLU
from tpcompile.ir.ops.spec import OpSpec, spec_of
from tpcompile.ir.simulate import local_args
from tpcompile.ir.types import PARTIAL, Shard
from tpcompile.rewriting.rewrite import insert, insert_after

aten = torch.ops.aten


def bias_on_every_rank(draft: Draft) -> str:
    """Add the bias of a row-parallel linear before the sum, so that it counts tp times."""
    total = draft.pick(
        [
            node
            for node in draft.calls(aten.add.Tensor)
            if operand(node, 1).op == "get_attr"
            and operand(node).target in (ALL_REDUCE, REDUCE_SCATTER)
        ],
        "bias after a sum",
    )
    collective, bias = operand(total), operand(total, 1)
    linear = operand(collective)
    inside = draft.dice.random() < 0.5
    if inside:
        linear.args = (*linear.args[:2], bias)
        bias.prepend(linear)
        linear.prepend(bias)
    else:
        with draft.graph.inserting_before(collective):
            draft.graph.node_copy(bias)
        early = insert_after(linear, aten.add.Tensor, linear, bias)
        linear.prepend(bias)
        early.meta["type"] = value_type(linear)
        collective.update_arg(0, early)
    total.replace_all_uses_with(collective)
    draft.graph.erase_node(total)
    return f"%{bias.name} added {'in' if inside else 'after'} %{linear.name} before the sum"


def norm_over_heads(draft: Draft) -> str:
    """Compute the per-head norm over all heads of a rank at once."""
    norms = [n for n in draft.calls(RMS_NORM) if operand(n).target is aten.unflatten.int]
    norm = draft.pick(norms, "norm per head")
    heads, flat = operand(norm), operand(operand(norm))
    layout = shard_of(flat).layout
    assert isinstance(layout, Layout)
    if max(layout.unit_count(rank) for rank in range(draft.tp)) < 2:
        raise UnfitError("every rank has one head, so the norm is the same")
    weight = operand(norm, 1)
    wide = _tiled_weight(draft, heads, parameter_of(weight), flat)
    with draft.graph.inserting_before(heads):
        early = insert(norm, RMS_NORM, flat, wide, norm.args[2])
    early.meta["type"] = value_type(flat)
    heads.update_arg(0, early)
    norm.replace_all_uses_with(heads)
    draft.graph.erase_node(norm)
    return f"%{norm.name} moved before %{heads.name}"


def norm_of_split(draft: Draft) -> str:
    """Insert a norm over the split values between two linears of a layer."""
    node = draft.pick(draft.calls(SWIGLU, aten.flatten.using_ints), "split value")
    scale = parameter_of(operand(draft.pick(draft.calls(RMS_NORM), "norm"), 1))
    (reader,) = node.users
    weight = _tiled_weight(draft, reader, scale, node)
    norm = insert_after(node, RMS_NORM, node, weight, 1e-6)
    norm.prepend(weight)
    norm.meta["type"] = value_type(node)
    node.replace_all_uses_with(norm, delete_user_cb=lambda user: user is not norm)
    return f"norm of %{node.name}, which is split"


def _tiled_weight(draft: Draft, place: fx.Node, scale: Parameter, value: fx.Node) -> fx.Node:
    """Insert a norm's scale with the width and the layout of a split value."""
    width = value_type(value).shape[-1]
    assert isinstance(width, int)
    layout = value_type(value).layout_of(-1)
    assert isinstance(layout, Layout)
    whole = Parameter.replicated(tiled(scale.whole, width), scale.type.dtype, draft.tp)
    return draft.new_parameter(place, "tiled_norm_weight", whole.sharded(0, layout))


def norm_weight_split(draft: Draft) -> str:
    """Split the scale of a norm across the ranks, like the weights around it."""
    norm = draft.pick(draft.calls(RMS_NORM), "norm")
    weight = operand(norm, 1)
    (width,) = value_type(weight).shape
    assert isinstance(width, int)
    run = width // draft.tp
    stops = [rank * run for rank in range(draft.tp)] + [width]
    parts = tuple(((a, b),) for a, b in pairwise(stops))
    set_parameter(weight, parameter_of(weight).sharded(0, Layout("hidden", width, 1, parts)))
    return f"%{weight.name} split"


def partial_into_swiglu(draft: Draft) -> str:
    """Omit the sum before an MLP, so that swiglu gets terms instead of values."""
    node = draft.pick(draft.calls(SWIGLU), "swiglu")
    (down,) = node.users
    return _feed_partial(draft, node, [*linears_behind(node)], down)


def partial_into_attention(draft: Draft) -> str:
    """Omit the sum before attention."""
    node = draft.pick(draft.attentions(), "attention")
    output = node
    while output.target is not LINEAR:
        (output,) = output.users
    return _feed_partial(draft, node, list(dict.fromkeys(linears_behind(node))), output)


def _feed_partial(draft: Draft, node: fx.Node, linears: list[fx.Node], output: fx.Node) -> str:
    """Make every rank compute the whole block from its own term."""
    source = operand(linears[0])
    earlier = [
        value
        for value in draft.graph.nodes
        if value < linears[0]
        and "type" in value.meta
        and getattr(value.meta["type"], "placement", None) == PARTIAL
        and value_type(value).shape == value_type(source).shape
    ]
    term = draft.pick(earlier, "term of a sum before it")
    for linear in linears:
        linear.args = (term, linear.args[1])
    for linear in (*linears, output):
        replicate(operand(linear, 1), draft.tp)
    return f"%{node.name} computed from the term %{term.name}"


def local_split_sizes(draft: Draft) -> str:
    """Give a split the sizes of one rank."""
    node = draft.pick(draft.calls(aten.split_with_sizes.default), "split")
    rank = draft.dice.randrange(draft.tp)
    spec = spec_of(node)
    assert isinstance(spec, OpSpec)
    node.update_arg(1, local_args(node, spec, rank)["split_sizes"])
    return f"%{node.name} with the sizes of rank {rank}"


def split_sizes_swapped(draft: Draft) -> str:
    node = draft.pick(draft.calls(aten.split_with_sizes.default), "split")
    sizes = list(node.args[1])  # type: ignore[arg-type]
    if sizes[0] == sizes[1]:
        raise UnfitError("the sizes are equal")
    sizes[:2] = sizes[1::-1]
    node.update_arg(1, sizes)
    return f"%{node.name} with sizes {sizes}"


def parts_read_swapped(draft: Draft) -> str:
    """Read the parts of a fused value in another order: queries as keys, keys as queries."""
    node = draft.pick(draft.calls(aten.split_with_sizes.default), "split")
    items = [user for user in node.users if user.target is operator.getitem]
    sizes = list(node.args[1])  # type: ignore[arg-type]
    if sizes[0] == sizes[1]:
        raise UnfitError("the parts have equal sizes")
    other = draft.pick(range(1, len(sizes)), "part")
    for item in items:
        if item.args[1] in (0, other):
            item.update_arg(1, other if item.args[1] == 0 else 0)
    return f"parts 0 and {other} of %{node.name} swapped where they are read"


def kv_map_given(draft: Draft) -> str:
    """Give attention a wrong map from query heads to KV heads."""
    node = draft.pick(draft.attentions(), "attention")
    spec = spec_of(node)
    assert isinstance(spec, OpSpec)
    queries, keys = (value_type(operand(node, i)).layout_of(1) for i in (0, 1))
    assert isinstance(queries, Layout) and isinstance(keys, Layout)
    counts = {(queries.unit_count(r), keys.unit_count(r)) for r in range(draft.tp)}
    derived = any(local_args(node, spec, rank) for rank in range(draft.tp))
    if derived or len(counts) > 1 or 1 in next(iter(counts)):
        raise UnfitError("the map is derived, or all query heads read one KV head")
    heads, shared = counts.pop()
    right = [head * shared // heads for head in range(heads)]
    wrong = draft.pick(
        [m for m in ([h % shared for h in range(heads)], right[::-1]) if m != right], "map"
    )
    node.kwargs = {"kv_heads": wrong}
    return f"%{node.name} with kv_heads={wrong}"


def split_twice(draft: Draft) -> str:
    """Split each head into two where heads are made, so that ranks can get halves."""
    node = draft.pick(draft.calls(aten.unflatten.int), "heads")
    sizes = list(node.args[2])  # type: ignore[arg-type]
    node.update_arg(2, [-1, sizes[1] // 2])
    kind = value_type(node)
    assert isinstance(kind.placement, Shard)
    return f"%{node.name} into pieces of {sizes[1] // 2}"
