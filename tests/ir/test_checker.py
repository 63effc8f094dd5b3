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

from tests.ir.broken import (
    EDITS,
    called,
    lowered,
    made_of,
    named,
    recipe_missing,
    redefined,
    second_owner,
    unknown_op,
)
from tests.models import preset_pair
from tests.stages import graph_after, stages_of
from tpcompile.errors import VerifyError
from tpcompile.ir.checker import Checker, check_graph, check_parameter, verify_graph
from tpcompile.ir.info import GraphInfo, info_of
from tpcompile.ir.layout import Layout, even_runs
from tpcompile.ir.meta import (
    Parameter,
    operand,
    origin_of,
    parameter_of,
    parameters,
    placement_of,
    set_parameter,
    value_type,
)
from tpcompile.ir.ops import ALL_REDUCE, LINEAR, REDUCE_SCATTER, RMS_NORM, SWIGLU, RuleError
from tpcompile.ir.problem import Problem
from tpcompile.ir.recipe import Concat, Pad, Permute, Slice, Tensor
from tpcompile.ir.text import format_node
from tpcompile.ir.types import Shard, ValueType
from tpcompile.passes import default_pipeline, insert_after, run_passes
from tpcompile.passes.sequence_parallel import SequenceParallel

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("rule", "edit", "got"),
    [(rule, edit, got) for rule, edits in EDITS.items() for _, edit, got in edits],
    ids=[f"{rule}: {title}" for rule, edits in EDITS.items() for title, _, _ in edits],
)
def test_each_rule_refuses_what_breaks_it(
    rule: str, edit: Callable[[fx.GraphModule], None], got: str
) -> None:
    gm, used = lowered(), Checker()
    assert used.check(gm) == []
    edit(gm)
    problems = check_graph(gm)
    assert used.check(gm) == problems, "a checker that has seen the graph finds the same"
    first = problems[0]
    assert first.rule == rule, first
    assert got in first.got, first
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
    problems = [problem for problem in check_graph(gm) if problem.rule == "recipe"]
    assert [problem.got for problem in problems] == ["no recipe"]


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("place", range(9))
def test_swapped_operands_of_a_linear_are_a_problem(model: str, place: int) -> None:
    """With and without a bias, which is then added to the result of no weight."""
    gm = graph_after(preset_pair(model), default_pipeline(2))
    node = [node for node in gm.graph.nodes if node.target is LINEAR][place]
    value, weight, *bias = node.args
    node.args = (weight, value, *bias)
    (problem,) = (reported for reported in check_graph(gm) if reported.rule == "weight")
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
    second_layer = [nodes[0] for key, nodes in layers.items() if key[2] == 1 and key[:2] in first]
    assert len(second_layer) >= 3
    for node in second_layer:
        old = operand(node)
        other = operand(first[old.target, node.args[1]])
        node.replace_input_with(old, other)
        problems = [problem for problem in check_graph(gm) if problem.rule == "item"]
        assert [(problem.node, problem.got) for problem in problems] == [
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
    rules = [problem.rule for problem in check_graph(gm)]
    assert sorted(rules) == ["one-owner", *["recipe"] * 4]


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
    "mistake",
    [
        "an argument missing",
        "an argument too many",
        "an argument twice",
        "a pair for a value",
        "an extent",
    ],
)
def test_calls_that_make_no_sense_are_problems_and_no_crash(mistake: str) -> None:
    gm = lowered()
    swiglu = called(gm, SWIGLU)
    if mistake == "an argument missing":
        swiglu.args = swiglu.args[:1]
    elif mistake == "an argument too many":
        swiglu.kwargs = {"scale": 3}
    elif mistake == "an argument twice":
        swiglu.kwargs = {"gate": swiglu.args[0]}
    elif mistake == "a pair for a value":
        swiglu.args = (operand(operand(swiglu)), swiglu.args[1])
    else:
        with gm.graph.inserting_before(swiglu):
            extent = gm.graph.call_function(aten.sym_size.int, (named(gm, "input_ids"), 0))
        swiglu.args = (extent, swiglu.args[1])
    assert any(problem.node == swiglu.name for problem in check_graph(gm))


def test_layouts_over_more_or_fewer_ranks_than_the_graph_are_refused() -> None:
    """Layouts must have one part per rank: at tp=2 four parts would lose half of the axis."""
    for parts in (4, 1):
        gm = lowered(2)
        weight = made_of(gm, "layers.0.mlp.down_proj")
        layout = value_type(weight).layout_of(1)
        assert isinstance(layout, Layout)
        other = dataclasses.replace(layout, parts=even_runs(layout.units, parts))
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
