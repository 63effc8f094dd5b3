"""The checker accepts valid graphs, and each of its rules detects a violation."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tests.models import preset_pair
from tests.stages import graph_after, stages_of
from tpcompile.errors import VerifyError
from tpcompile.ir.checker import Checker, check_graph, check_parameter, verify_graph
from tpcompile.ir.info import GraphInfo, info_of
from tpcompile.ir.layout import FusedLayout, Layout, TokenLayout, even_runs
from tpcompile.ir.meta import (
    Parameter,
    new_parameter,
    operand,
    origin_of,
    parameter_of,
    parameters,
    placement_of,
    set_parameter,
    value_type,
)
from tpcompile.ir.ops import (
    ALL_REDUCE,
    LINEAR,
    PAGED_ATTENTION,
    REDUCE_SCATTER,
    RMS_NORM,
    SPECS,
    SWIGLU,
    RuleError,
)
from tpcompile.ir.problem import Problem
from tpcompile.ir.recipe import Concat, Pad, Permute, Recipe, Slice, Tensor, shape_of
from tpcompile.ir.text import format_node
from tpcompile.ir.types import PARTIAL, Shard, ValueType
from tpcompile.passes import default_pipeline, insert_after, run_passes
from tpcompile.passes.sequence_parallel import SequenceParallel

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


# Edits that break one rule each.


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
    first, *others = parameter_of(weight).shards
    redefined(weight, shards=(Slice(first, 0, 0, 63), *others))


def recipe_of_another_part(gm: fx.GraphModule) -> None:
    """Swap the recipes of two ranks; the shapes match."""
    weight = made_of(gm, "layers.0.mlp.down_proj")
    one, other, *rest = parameter_of(weight).shards
    redefined(weight, shards=(other, one, *rest))


def recipe_shifted_by_one(gm: fx.GraphModule) -> None:
    weight = made_of(gm, "layers.0.self_attn.o_proj")
    first, *others = parameter_of(weight).shards
    assert isinstance(first, Slice)
    redefined(weight, shards=(dataclasses.replace(first, start=1, stop=33), *others))


def recipe_of_another_tensor(gm: fx.GraphModule) -> None:
    """Swap gate and up on one rank."""
    weight = made_of(gm, "layers.0.mlp.gate_proj")
    *others, last = parameter_of(weight).shards
    assert isinstance(last, Concat)
    redefined(weight, shards=(*others, Concat(last.sources[::-1], 0)))


def recipe_missing(gm: fx.GraphModule) -> None:
    weight = made_of(gm, "layers.0.self_attn.o_proj")
    redefined(weight, shards=parameter_of(weight).shards[:-1])


def recipe_of_the_whole(gm: fx.GraphModule) -> None:
    norm = made_of(gm, "layers.0.input_layernorm")
    redefined(norm, whole=Slice(parameter_of(norm).whole, 0, 0, 63))


def replicas_that_differ(gm: fx.GraphModule) -> None:
    norm = made_of(gm, "layers.0.input_layernorm")
    other = parameter_of(made_of(gm, "layers.1.input_layernorm")).whole
    first, *others = parameter_of(norm).shards
    redefined(norm, shards=(first, *others[:-1], other))


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
    logits, *rest = info.outputs
    shorter = dataclasses.replace(logits, shape=(logits.shape[0], rows - 1))
    gm.meta["tpcompile"] = dataclasses.replace(info, outputs=(shorter, *rest))


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


@pytest.mark.parametrize(
    ("rule", "edit", "found"),
    [(rule, edit, found) for rule, edits in EDITS.items() for _, edit, found in edits],
    ids=[f"{rule}: {what}" for rule, edits in EDITS.items() for what, _, _ in edits],
)
def test_each_rule_refuses_what_breaks_it(
    rule: str, edit: Callable[[fx.GraphModule], None], found: str
) -> None:
    gm, used = lowered(), Checker()
    assert used.check(gm) == []
    edit(gm)
    problems = check_graph(gm)
    assert used.check(gm) == problems, "a checker that has seen the graph finds the same"
    first = problems[0]
    assert first.rule == rule, first
    assert found in first.got, first
    assert first.expected
    with pytest.raises(VerifyError, match=f"rule {rule}"):
        verify_graph(gm)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3"])
def test_good_graphs_have_no_problem(name: str, tp: int) -> None:
    stages = stages_of(preset_pair(name), default_pipeline(tp))
    gm = stages[-1].graph
    assert check_graph(gm) == []
    verify_graph(gm)
    for stage in stages:
        assert check_graph(stage.graph) == [], stage.name


def test_problems_say_where_what_and_what_to_do() -> None:
    gm = lowered()
    norm = called(gm, RMS_NORM)
    norm.args = (operand(operand(norm)), *norm.args[1:])
    (problem,) = check_graph(gm)
    source = f"model.layers.0.input_layernorm {origin_of(norm).place}"
    assert re.search(r" modeling_qwen3\.py:\d+$", source)
    assert problem.to_json() == {
        "node": "l0_input_normed",
        "source": source,
        "rule": "partial-nonlinear",
        "got": "f32[T, 64] Partial(disjoint)",
        "expected": "an operand that is already summed",
        "hint": "only linear ops accept a Partial: put the all_reduce before this node",
        "line": format_node(norm),
        "details": (),
        "others": (),
    }
    assert str(problem) == (
        f"%l0_input_normed ({source}) breaks the rule "
        "partial-nonlinear: found f32[T, 64] Partial(disjoint); expected an operand that is "
        "already summed. Only linear ops accept a Partial: put the all_reduce before this node."
        "\n    " + problem.line
    )


@pytest.mark.parametrize("missing", ["parameter", "made_of"])
def test_a_parameter_without_a_recipe_is_a_problem(missing: str) -> None:
    gm = lowered()
    del made_of(gm, "layers.0.self_attn.o_proj").meta[missing]
    found = [problem for problem in check_graph(gm) if problem.rule == "recipe"]
    assert [problem.got for problem in found] == ["no recipe"]


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("place", range(9))
def test_swapped_operands_of_a_linear_are_a_problem(model: str, place: int) -> None:
    """With and without a bias, which is then added to the result of no weight."""
    gm = graph_after(preset_pair(model), default_pipeline(2))
    node = [node for node in gm.graph.nodes if node.target is LINEAR][place]
    value, weight, *rest = node.args
    node.args = (weight, value, *rest)
    (problem,) = (one for one in check_graph(gm) if one.rule == "weight")
    assert (problem.node, problem.got) == (node.name, f"the weight %{value}")
    assert problem.expected.startswith("a parameter")


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_a_result_of_another_layer_s_op_is_a_problem(model: str) -> None:
    gm = graph_after(preset_pair(model), default_pipeline(2))
    items = [node for node in gm.graph.nodes if node.target is operator.getitem]
    layers: dict[Any, list[fx.Node]] = {}
    for node in items:
        source = operand(node)
        layers.setdefault((source.target, node.args[1], origin_of(source).layer), []).append(node)
    first = {key[:2]: nodes[0] for key, nodes in layers.items() if key[2] == 0}
    others = [nodes[0] for key, nodes in layers.items() if key[2] == 1 and key[:2] in first]
    assert len(others) >= 3
    for node in others:
        old = operand(node)
        other = operand(first[old.target, node.args[1]])
        node.replace_input_with(old, other)
        found = [one for one in check_graph(gm) if one.rule == "item"]
        assert [(one.node, one.got) for one in found] == [
            (node.name, f"a result of %{other.name}, an op of another layer")
        ]
        node.replace_input_with(other, old)
    assert check_graph(gm) == []


def test_problems_without_source_or_hint_read_well_too() -> None:
    problem = Problem("x", "", "input", "this", "that", "", "%x = input : f32[2] Replicate")
    assert str(problem).startswith("%x breaks the rule input: found this; expected that.\n    %x")


def test_the_error_shows_the_first_problem_and_how_many_there_are() -> None:
    gm = lowered()
    recipe_missing(gm)
    unknown_op(gm)
    with pytest.raises(VerifyError) as caught:
        verify_graph(gm)
    assert "rule recipe (" in str(caught.value) and "in all" in str(caught.value)
    assert format_node(made_of(gm, "layers.0.self_attn.o_proj")) in str(caught.value)


def test_every_problem_is_found_and_not_only_the_first() -> None:
    """All problems are reported: faults in both layers and at the end."""
    gm = lowered()
    for weight in parameters(gm.graph):
        tensors = parameter_of(weight).describe()
        if "down_proj" in tensors:
            redefined(weight, shards=parameter_of(weight).shards[::-1])
        if "post_attention_layernorm" in tensors:
            redefined(weight, shards=())
    second_owner(gm)
    found = [problem.rule for problem in check_graph(gm)]
    assert sorted(found) == ["one-owner", *["recipe"] * 4]


def test_an_order_problem_is_found_behind_another_problem() -> None:
    gm = lowered()
    recipe_missing(gm)
    last = named(gm, "lm_head_whole")
    operand(last).prepend(last)
    assert {"recipe", "order"} <= {problem.rule for problem in check_graph(gm)}


def test_new_nodes_in_the_wrong_order_are_found() -> None:
    """A new node that reads a later one is reported, although neither has a type yet."""
    gm = lowered()
    output = named(gm, "output")
    with gm.graph.inserting_before(output):
        early = gm.graph.call_function(aten.clone.default, (output.args[0],))
        late = gm.graph.call_function(aten.clone.default, (output.args[0],))
    early.args = (late,)
    output.args = (early,)
    assert [(problem.rule, problem.node) for problem in check_graph(gm)] == [("order", early.name)]


def test_a_value_that_cannot_be_typed_hides_only_what_reads_it() -> None:
    gm = lowered()
    unknown_op(gm)
    broken = check_graph(gm)
    assert [problem.rule for problem in broken] == ["known-op"]


@pytest.mark.parametrize(
    "what",
    [
        "an argument missing",
        "an argument too many",
        "an argument twice",
        "a pair for a value",
        "an extent",
    ],
)
def test_calls_that_make_no_sense_are_problems_and_no_crash(what: str) -> None:
    gm = lowered()
    swiglu = called(gm, SWIGLU)
    if what == "an argument missing":
        swiglu.args = swiglu.args[:1]
    elif what == "an argument too many":
        swiglu.kwargs = {"scale": 3}
    elif what == "an argument twice":
        swiglu.kwargs = {"gate": swiglu.args[0]}
    elif what == "a pair for a value":
        swiglu.args = (operand(operand(swiglu)), swiglu.args[1])
    else:
        with gm.graph.inserting_before(swiglu):
            extent = gm.graph.call_function(aten.sym_size.int, (named(gm, "input_ids"), 0))
        swiglu.args = (extent, swiglu.args[1])
    assert any(problem.node == swiglu.name for problem in check_graph(gm))


def test_layouts_over_more_or_fewer_ranks_than_the_graph_are_refused() -> None:
    """Layouts must have one part per rank: at tp=2 four parts would lose half of the axis."""
    for others in (4, 1):
        gm = lowered(2)
        weight = made_of(gm, "layers.0.mlp.down_proj")
        layout = value_type(weight).layout_of(1)
        assert isinstance(layout, Layout)
        other = dataclasses.replace(layout, parts=even_runs(layout.units, others))
        sharded = dataclasses.replace(
            parameter_of(weight), type=value_type(weight).sharded(1, other)
        )
        recipes = Parameter.replicated(sharded.whole, torch.float32, 1).sharded(1, other).shards
        padded = (*recipes, *recipes)[:2]
        with pytest.raises(RuleError):
            check_parameter(dataclasses.replace(sharded, shards=padded), 2)


def test_scattering_over_another_number_of_ranks_is_refused() -> None:
    """`reduce_scatter(x, 3)` on two ranks is refused, since it would lose a third of the tokens."""
    captured = preset_pair("tiny-qwen3").captured.graph
    gm, _ = run_passes(captured, [*default_pipeline(2), SequenceParallel()])
    assert check_graph(gm) == []
    for node in gm.graph.nodes:
        if node.target is REDUCE_SCATTER:
            node.args = (node.args[0], 3)
    assert check_graph(gm) != []


def test_one_checker_checks_parameters_anew_for_another_number_of_ranks() -> None:
    gm = lowered(2)
    checker = Checker()
    assert checker.check(gm) == []
    info_of(gm).tp = 3
    assert {problem.rule for problem in checker.check(gm)} >= {"recipe"}


def test_a_graph_without_a_result_is_refused() -> None:
    gm = lowered()
    gm.graph.erase_node(named(gm, "output"))
    assert check_graph(gm) != []


def test_types_are_set_on_the_way() -> None:
    gm = lowered()
    for node in gm.graph.nodes:
        if node.op == "call_function":
            del node.meta["type"]
    assert check_graph(gm) == []
    assert placement_of(named(gm, "l0_swiglu")) == placement_of(named(gm, "l0_gate_proj"))


def test_a_doubled_collective_is_refused() -> None:
    gm = lowered()
    node = called(gm, ALL_REDUCE)
    again = insert_after(node, ALL_REDUCE, node)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    assert [problem.rule for problem in check_graph(gm)] == ["all-reduce"]


W = Tensor("w", (6, 4))
ROWS = Layout("rows", 6, 1, even_runs(6, 2))


@pytest.mark.parametrize(
    "whole",
    [
        W,
        Concat((W, Tensor("v", (6, 4))), 0),
        Pad(W, 0, 2),
        Pad(W, 1, 1),
        Permute(W, 0, (2, 3), (1, 0)),
        Permute(W, 1, (2, 2), (1, 0)),
        Concat((Slice(W, 1, 0, 1), Slice(W, 1, 2, 4)), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_made_with_sharded_are_good(whole: Any, dim: int) -> None:
    good = Parameter.replicated(whole, torch.float32, 2)
    check_parameter(good, 2)
    extent = good.type.shape[dim]
    assert isinstance(extent, int)
    for parts in (even_runs(extent, 2), (((0, 1), (2, extent)), ((1, 3),))):
        check_parameter(good.sharded(dim, Layout("axis", extent, 1, parts)), 2)


def test_recipes_are_compared_by_what_they_copy_and_not_by_how_they_are_written() -> None:
    sharded = Parameter.replicated(W, torch.float32, 2).sharded(0, ROWS)
    first, second = sharded.shards
    roundabout = Concat((Slice(W, 0, 0, 2), Slice(Slice(W, 0, 1, 6), 0, 1, 2)), 0)
    check_parameter(dataclasses.replace(sharded, shards=(roundabout, second)), 2)
    lookalike = Concat((Slice(W, 0, 1, 2), Slice(W, 0, 0, 2)), 0)
    for wrong in (lookalike, Pad(Slice(W, 0, 0, 2), 0, 1), Slice(Tensor("v", (6, 4)), 0, 0, 3)):
        with pytest.raises(RuleError) as caught:
            check_parameter(dataclasses.replace(sharded, shards=(wrong, second)), 2)
        assert caught.value.rule == "recipe"
    assert isinstance(first, Slice)


def test_two_parameters_may_own_different_rows_of_a_tensor() -> None:
    """Parameters may use different rows of one tensor, as in checkpoints with fused q and k."""
    graph = fx.Graph()
    for name, start, stop in (("q", 0, 4), ("k", 4, 6)):
        node = graph.get_attr(name)
        set_parameter(node, Parameter.replicated(Slice(W, 0, start, stop), torch.float32, 1))
    first, _ = graph.nodes
    graph.call_function(torch.ops.aten.neg.default, (first,))
    result = value_type(node)
    graph.output(node)
    gm = fx.GraphModule({"q": torch.zeros(1), "k": torch.zeros(1)}, graph)
    gm.meta["tpcompile"] = GraphInfo("two", 1, (result,))
    assert check_graph(gm) == []
    overlapping = Parameter.replicated(Slice(W, 0, 3, 6), torch.float32, 1)
    set_parameter(node, overlapping)
    gm.meta["tpcompile"] = GraphInfo("two", 1, (overlapping.type,))
    (problem,) = check_graph(gm)
    assert (problem.rule, problem.node) == ("one-owner", "k")


def test_a_shard_is_of_its_own_dimension() -> None:
    kind = ValueType((6, 4), torch.float32, Shard(2, ROWS))
    with pytest.raises(RuleError) as caught:
        check_parameter(Parameter(kind, W, (W, W)), 2)
    assert caught.value.rule == "layout"
