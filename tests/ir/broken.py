"""Edits of tiny-qwen3's graph that break one rule of the checker each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tests.models import preset_pair
from tests.stages import graph_after
from tpcompile.ir.info import info_of
from tpcompile.ir.layout import FusedLayout, Layout, TokenLayout, even_runs
from tpcompile.ir.meta import (
    Parameter,
    new_parameter,
    operand,
    origin_of,
    parameter_of,
    parameters,
    set_parameter,
    value_type,
)
from tpcompile.ir.ops import LINEAR, PAGED_ATTENTION, RMS_NORM, SPECS, SWIGLU
from tpcompile.ir.recipe import Concat, Permute, Recipe, Slice, Tensor, shape_of
from tpcompile.ir.types import PARTIAL, ValueType
from tpcompile.passes import default_pipeline

aten = torch.ops.aten


def lowered(tp: int = 4, until: str = "") -> fx.GraphModule:
    """Return tiny-qwen3 after the standard passes, or after a prefix of them."""
    passes = default_pipeline(tp)
    names = [current.name for current in passes]
    passes = passes[: names.index(until) + 1] if until else passes
    return graph_after(preset_pair("tiny-qwen3"), passes)


def named(gm: fx.GraphModule, part: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if part in node.name)


def called(gm: fx.GraphModule, target: Any) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.target is target)


def made_of(gm: fx.GraphModule, tensor: str) -> fx.Node:
    """Return the parameter made from a checkpoint tensor."""
    return next(n for n in parameters(gm.graph) if tensor in parameter_of(n).describe())


def redefined(node: fx.Node, **changes: Any) -> None:
    set_parameter(node, dataclasses.replace(parameter_of(node), **changes))


def unknown_op(gm: fx.GraphModule) -> None:
    swiglu = called(gm, SWIGLU)
    swiglu.target = aten.maximum.default


def used_before(gm: fx.GraphModule) -> None:
    """Move a norm before its operand."""
    norm = called(gm, RMS_NORM)
    operand(norm).prepend(norm)


def split_input(gm: fx.GraphModule) -> None:
    node = named(gm, "input_ids")
    node.meta["type"] = ValueType((8,), torch.int64).sharded(0, Layout("t", 8, 1, even_runs(8, 4)))


def split_slots(gm: fx.GraphModule) -> None:
    """Split the slots: the cache may be split like the keys, but not its indices."""
    node = named(gm, "slots")
    node.meta["type"] = value_type(node).sharded(0, TokenLayout(4))


def split_input_as_keys(gm: fx.GraphModule) -> None:
    """Add split keys as an input; only the cache may be a split input."""
    node, attention = named(gm, "cache"), called(gm, PAGED_ATTENTION)
    with gm.graph.inserting_after(node):
        keys = gm.graph.placeholder("keys")
    keys.meta["type"] = value_type(operand(attention, 1))
    attention.update_arg(1, keys)


def summed_cache(gm: fx.GraphModule) -> None:
    node = named(gm, "cache")
    node.meta["type"] = value_type(node).placed(PARTIAL)


def cache_read_elsewhere(gm: fx.GraphModule) -> None:
    node = named(gm, "cache")
    with gm.graph.inserting_before(called(gm, PAGED_ATTENTION)):
        gm.graph.call_function(aten.neg.default, (node,))


def relaid_cache(parts: Any) -> Callable[[fx.GraphModule], None]:
    def edit(gm: fx.GraphModule) -> None:
        node = named(gm, "cache")
        layout = value_type(node).layout_of(3)
        assert isinstance(layout, Layout)
        node.meta["type"] = value_type(node).sharded(3, dataclasses.replace(layout, parts=parts))

    return edit


def cache_of_one_layer(gm: fx.GraphModule) -> None:
    first, second = (node for node in gm.graph.nodes if node.target is PAGED_ATTENTION)
    place = SPECS[PAGED_ATTENTION].argument_names.index("layer")
    second.update_arg(place, first.args[place])


def cache_layers_swapped(gm: fx.GraphModule) -> None:
    place = SPECS[PAGED_ATTENTION].argument_names.index("layer")
    for node in gm.graph.nodes:
        if node.target is PAGED_ATTENTION:
            node.update_arg(place, 1 - node.args[place])


def cache_of_other_blocks(gm: fx.GraphModule) -> None:
    place = SPECS[PAGED_ATTENTION].argument_names.index("block")
    called(gm, PAGED_ATTENTION).update_arg(place, 16)


def recipe_shape(gm: fx.GraphModule) -> None:
    weight = made_of(gm, "layers.0.self_attn.q_proj")
    first, *other_shards = parameter_of(weight).shards
    redefined(weight, shards=(Slice(first, 0, 0, 63), *other_shards))


def recipe_of_another_part(gm: fx.GraphModule) -> None:
    """Swap the recipes of two ranks; the shapes match."""
    weight = made_of(gm, "layers.0.mlp.down_proj")
    first, second, *other_shards = parameter_of(weight).shards
    redefined(weight, shards=(second, first, *other_shards))


def recipe_shifted_by_one(gm: fx.GraphModule) -> None:
    weight = made_of(gm, "layers.0.self_attn.o_proj")
    first, *other_shards = parameter_of(weight).shards
    assert isinstance(first, Slice)
    redefined(weight, shards=(dataclasses.replace(first, start=1, stop=33), *other_shards))


def recipe_of_another_tensor(gm: fx.GraphModule) -> None:
    """Swap gate and up on one rank."""
    weight = made_of(gm, "layers.0.mlp.gate_proj")
    *other_shards, last = parameter_of(weight).shards
    assert isinstance(last, Concat)
    redefined(weight, shards=(*other_shards, Concat(last.sources[::-1], 0)))


def recipe_missing(gm: fx.GraphModule) -> None:
    weight = made_of(gm, "layers.0.self_attn.o_proj")
    redefined(weight, shards=parameter_of(weight).shards[:-1])


def recipe_of_the_whole(gm: fx.GraphModule) -> None:
    norm = made_of(gm, "layers.0.input_layernorm")
    redefined(norm, whole=Slice(parameter_of(norm).whole, 0, 0, 63))


def replicas_that_differ(gm: fx.GraphModule) -> None:
    norm = made_of(gm, "layers.0.input_layernorm")
    other = parameter_of(made_of(gm, "layers.1.input_layernorm")).whole
    first, *other_shards = parameter_of(norm).shards
    redefined(norm, shards=(first, *other_shards[:-1], other))


def rewritten(tensor: str, change: Callable[[Recipe], Recipe]) -> Callable[[fx.GraphModule], None]:
    """Change the rows of a tensor, in the whole and on all ranks."""

    def edit(gm: fx.GraphModule) -> None:
        node = made_of(gm, tensor)
        old = parameter_of(node)
        whole = change(old.whole)
        assert shape_of(whole) == shape_of(old.whole)
        new = dataclasses.replace(old, whole=whole).on_ranks(len(old.shards))
        layout = old.type.layout_of(0)
        split = isinstance(layout, Layout | FusedLayout)
        set_parameter(node, new.sharded(0, layout) if split else new)

    return edit


def _repeated(whole: Recipe) -> Recipe:
    """Repeat the first row and drop the last one."""
    return Concat((Slice(whole, 0, 0, 1), Slice(whole, 0, 0, shape_of(whole)[0] - 1)), 0)


def _turned(whole: Recipe) -> Recipe:
    middle = shape_of(whole)[0] // 2
    return Concat((Slice(whole, 0, middle, 2 * middle), Slice(whole, 0, 0, middle)), 0)


def _interleaved_rows(whole: Recipe) -> Recipe:
    """Interleave rows like interleave-rotary, without changing the type."""
    return Permute(whole, 0, (1, 2, shape_of(whole)[0] // 2), (0, 2, 1))


def _longer(whole: Recipe) -> Recipe:
    """Slice from a tensor with more rows than the checkpoint has."""
    assert isinstance(whole, Tensor)
    return Slice(Tensor(whole.name, (65, *whole.shape[1:])), 0, 1, 65)


def _other_layer(whole: Recipe) -> Recipe:
    assert isinstance(whole, Tensor)
    return Tensor(whole.name.replace(".0.", ".1."), whole.shape)


def _parts_swapped(whole: Recipe) -> Recipe:
    assert isinstance(whole, Concat)
    return Concat(whole.sources[::-1], 0)


def _last_row_skipped(gm: fx.GraphModule) -> None:
    """Remove the last row of the table and the last logit consistently."""
    table = made_of(gm, "embed_tokens")
    old = parameter_of(table)
    rows, width = shape_of(old.whole)
    less = Layout("vocab", rows - 1, 1, even_runs(rows - 1, len(old.shards)))
    kind = ValueType((rows - 1, width), old.type.dtype)
    whole = Slice(old.whole, 0, 0, rows - 1)
    set_parameter(table, Parameter(kind, whole, ()).on_ranks(len(old.shards)).sharded(0, less))
    info = info_of(gm)
    logits, *other_outputs = info.outputs
    shorter = dataclasses.replace(logits, shape=(logits.shape[0], rows - 1))
    gm.meta["tpcompile"] = dataclasses.replace(info, outputs=(shorter, *other_outputs))


def relaid(tensor: str, dim: int, parts: Any) -> Callable[[fx.GraphModule], None]:
    """Change the layout, with matching recipes."""

    def edit(gm: fx.GraphModule) -> None:
        weight = made_of(gm, tensor)
        layout = value_type(weight).layout_of(dim)
        assert isinstance(layout, Layout)
        set_parameter(
            weight,
            parameter_of(weight).sharded(dim, dataclasses.replace(layout, parts=parts)),
        )

    return edit


O_PROJ = "layers.0.self_attn.o_proj"
QKV, NORM = "layers.0.self_attn.q_proj", "layers.0.input_layernorm"
GAP = ((0, 2),), ((2, 3),), ((4, 5),), ((5, 6),)
IDLE = ((0, 2),), ((2, 4),), ((4, 6),), ((6, 6),)
TWICE = ((0, 2), (1, 3)), ((3, 4),), ((4, 5),), ((5, 6),)
OUTSIDE = ((0, 2),), ((2, 4),), ((4, 5),), ((5, 7),)
SHARED = ((0, 3),), ((2, 4),), ((4, 5),), ((5, 6),)


def wrong_span(gm: fx.GraphModule) -> None:
    weight = made_of(gm, "layers.0.self_attn.o_proj")
    layout = Layout("q_heads", 5, 16, even_runs(5, 4))
    redefined(weight, type=value_type(weight).sharded(1, layout))


def partial_weight(gm: fx.GraphModule) -> None:
    weight = made_of(gm, "layers.0.input_layernorm")
    redefined(weight, type=value_type(weight).placed(PARTIAL))


def segments_of_other_ranks(gm: fx.GraphModule) -> None:
    weight = made_of(gm, "layers.0.mlp.gate_proj")
    layout = value_type(weight).layout_of(0)
    assert isinstance(layout, FusedLayout)
    gate, up = layout.segments
    fewer = dataclasses.replace(up, parts=even_runs(up.units, 3))
    redefined(weight, type=value_type(weight).sharded(0, FusedLayout((gate, fewer))))


def second_owner(gm: fx.GraphModule) -> None:
    """Give the head its own parameter, made from the embedding's tensor."""
    table = made_of(gm, "embed_tokens")
    head = next(node for node in table.users if node.target is LINEAR)
    with gm.graph.inserting_before(head):
        twin = new_parameter(gm.graph, "head_weight", parameter_of(table), origin_of(table), gm)
    head.args = (head.args[0], twin)


def result_split(gm: fx.GraphModule) -> None:
    output = named(gm, "output")
    output.args = (operand(operand(output)),)


def result_of_another_shape(gm: fx.GraphModule) -> None:
    output = named(gm, "output")
    output.args = (named(gm, "l1_post_attention_normed"),)


EDITS: dict[str, tuple[tuple[str, Callable[[fx.GraphModule], None], str], ...]] = {
    "known-op": (("an op without a rule", unknown_op, "aten.maximum"),),
    "order": (("a use before the value", used_before, "a use of %"),),
    "input": (
        ("an input on some ranks", split_input, "Shard(0, t)"),
        ("slots on some ranks", split_slots, "Shard(0, tokens)"),
        ("split keys as an input", split_input_as_keys, "Shard(1, kv_heads)"),
        ("a partial cache", summed_cache, "Partial(sum)"),
        ("a cache that is read elsewhere", cache_read_elsewhere, "Shard(3, kv_heads)"),
    ),
    "ranks": (("a cache on other ranks", relaid_cache((((0, 1),), ((1, 2),))), "on 2 ranks"),),
    "kv-cache": (
        ("two layers in one place", cache_of_one_layer, "layer 0 of the cache"),
        ("layers in another order", cache_layers_swapped, "layer 0 of the cache after layer 1"),
        ("a layer of other blocks", cache_of_other_blocks, "block=16"),
        (
            "heads on other ranks than the keys",
            relaid_cache((((0, 1),),) * 3 + (((1, 2),),)),
            "cache",
        ),
    ),
    "recipe": (
        ("a shape that is not the type's", recipe_shape, "shape (63, 64) on rank 0"),
        ("the columns of another rank", recipe_of_another_part, "on rank 0"),
        ("columns shifted by one", recipe_shifted_by_one, "1:33"),
        ("another tensor", recipe_of_another_tensor, "on rank 3"),
        ("too few recipes", recipe_missing, "3 recipes"),
        ("a whole that is not the type's", recipe_of_the_whole, "shape (63,)"),
        ("replicas that differ", replicas_that_differ, "on rank 3"),
        ("a row twice", rewritten(NORM, _repeated), "[0:1]"),
        ("swapped halves", rewritten(NORM, _turned), "[32:64]"),
        ("rows interleaved", rewritten(NORM, _interleaved_rows), "permute("),
        ("a row of the fused rows twice", rewritten(QKV, _repeated), "[0:1]"),
        ("fused parts swapped", rewritten("layers.0.mlp.gate_proj", _parts_swapped), "made of"),
        ("the tensor of another layer", rewritten(NORM, _other_layer), "layers.1.input"),
        ("a tensor of another shape", rewritten(NORM, _longer), "[65]"),
        ("a row that nothing reads", _last_row_skipped, "1 rows of model.embed_tokens"),
    ),
    "layout": (
        ("a head that no cache has", relaid_cache((((0, 1),),) * 4), "unit 1 (1 missing)"),
        (
            "a unit that no rank holds",
            relaid(O_PROJ, 1, GAP),
            "unit 3 (1 missing)",
        ),
        (
            "a rank without units",
            relaid(O_PROJ, 1, IDLE),
            "rank 3 holds no units",
        ),
        (
            "a unit twice on a rank",
            relaid(O_PROJ, 1, TWICE),
            "twice or out of order",
        ),
        (
            "a unit out of range",
            relaid(O_PROJ, 1, OUTSIDE),
            "outside the 6 units",
        ),
        ("another extent", wrong_span, "spans 80, dimension 1 spans 96"),
        ("segments on fewer ranks", segments_of_other_ranks, "different numbers of ranks"),
    ),
    "contraction-layout": (("columns on two ranks", relaid(O_PROJ, 1, SHARED), "times weight"),),
    "partial-weight": (("a weight to be summed", partial_weight, "Partial(sum)"),),
    "one-owner": (("a tied weight twice", second_owner, "model.embed_tokens.weight"),),
    "result": (
        ("a result on some ranks", result_split, "Shard(1, vocab)"),
        ("another result", result_of_another_shape, "f32[R, 64]"),
    ),
}
