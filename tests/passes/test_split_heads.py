"""Parts of heads, such as queries and their gates, come from linears of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.models import NEXT
from tests.passes.graphs import GraphBuilder, nearest
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import parameter_of, set_parameter
from tpcompile.ir.ops import LINEAR
from tpcompile.ir.recipe import Concat, Slice, Tensor
from tpcompile.ir.roles import HeadParts
from tpcompile.ir.simulate import materialise
from tpcompile.passes.split_heads import SplitHeads
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import weight_of

aten = torch.ops.aten
MODEL, NAME = "tiny-qwen3.5", "split-heads"
HEADS, WIDTH = 6, 16
KEYS, VALUES = 3, 6
"""The heads of linear attention, which are as wide as those of attention."""


@pytest.mark.parametrize(("model", "file"), [(MODEL, "split_heads"), (NEXT, "split_heads_next")])
def test_golden(model: str, file: str, golden: Callable[[str, str], None]) -> None:
    golden(f"passes/{file}.txt", step(NAME, model).diff("layer 1"))


def test_matches_every_split_of_heads() -> None:
    """Qwen3-Next has two in each layer of linear attention, and as Qwen3.5 one in attention."""
    matches = [step(NAME, model).matches for model in (MODEL, NEXT, "tiny-qwen3")]
    assert matches == [1, 2 * 3 + 1, 0]


@pytest.mark.parametrize("model", [MODEL, NEXT])
def test_numbers(model: str) -> None:
    step(NAME, model).assert_near()


@pytest.mark.parametrize("model", [MODEL, NEXT])
def test_again(model: str) -> None:
    assert step(NAME, model).again().matches == 0


def test_rows_of_queries_and_of_gates() -> None:
    """A head of the checkpoint is a query, then its gate; the two linears have a half of each."""
    current = step(NAME, MODEL)
    before, after = (
        materialise(s.graph, current.pair.read) for s in (current.before, current.after)
    )
    whole = before["l3_q_proj_weight"][0].view(HEADS, 2, WIDTH, -1)
    for place in range(2):
        part = after[f"l3_q_proj_{place}_weight"][0]
        assert torch.equal(part, whole[:, place].flatten(0, 1))


def test_rows_of_linear_attention() -> None:
    """A key head of the checkpoint is its query, its key, and the values and gates of its heads."""
    current = step(NAME, NEXT)
    before, after = (
        materialise(s.graph, current.pair.read) for s in (current.before, current.after)
    )
    values = VALUES // KEYS
    for name, sizes, joined in (
        ("qkvz", (WIDTH, WIDTH, values * WIDTH, values * WIDTH), ((0, 1, 2), (3,))),
        ("ba", (values, values), ((0,), (1,))),
    ):
        whole = before[f"l2_in_proj_{name}_weight"][0].unflatten(0, (KEYS, -1))
        parts = [part.flatten(0, 1) for part in whole.split(sizes, 1)]
        for places in joined:
            numbers = "_".join(map(str, places))
            weight = after[f"l2_in_proj_{name}_{numbers}_weight"][0]
            assert torch.equal(weight, torch.cat([parts[place] for place in places]))


def test_the_layers_of_qwen3_next_become_those_of_qwen35() -> None:
    """After the passes that recognise ops, both graphs have the same ops."""
    node_lists = [step("raise-attention", model).after.graph.graph.nodes for model in (MODEL, NEXT)]
    ops, next_ops = (
        [str(n.target) for n in nodes if n.op == "call_function"] for nodes in node_lists
    )
    assert sorted(ops) == sorted(next_ops)


def test_a_gate_in_place_of_its_query_does_not_pass_the_checker() -> None:
    """The type of a parameter says which rows it has: another recipe of the same shape is seen."""
    gm = clone(step(NAME, MODEL).after.graph)
    parts = [
        weight
        for weight in map(weight_of, calls(gm, LINEAR))
        if isinstance(parameter_of(weight).type.role, HeadParts)
    ]
    first, second = (parameter_of(weight) for weight in parts)
    set_parameter(parts[0], replace(first, whole=second.whole, shards=second.shards))
    assert "recipe" in {problem.rule for problem in check_graph(gm)}


def test_keys_in_place_of_queries_do_not_pass_the_checker() -> None:
    """One tensor gives several runs of rows, and the type says which comes first."""
    gm = clone(step(NAME, NEXT).after.graph)
    weight = next(w for w in map(weight_of, calls(gm, LINEAR)) if str(w.target) == JOINED)
    parameter = parameter_of(weight)
    assert isinstance(parameter.whole, Concat) and isinstance(parameter.type.role, HeadParts)
    assert len(parameter.type.role.runs) == 3
    query, key, value = parameter.whole.sources
    swapped = Concat((key, query, value), 0)
    set_parameter(weight, replace(parameter, whole=swapped, shards=(swapped,) * 4))
    assert {problem.rule for problem in check_graph(gm)} == {"recipe"}


JOINED = "l0_in_proj_qkvz_0_1_2_weight"


@pytest.mark.parametrize(
    ("read_twice", "dim", "reason"),
    [
        (True, -1, "another node reads the whole heads"),
        (False, 1, "it does not split heads"),
    ],
)
def test_near_misses(read_twice: bool, dim: int, reason: str) -> None:
    builder = GraphBuilder()
    features = builder.linear(builder.input("x", "T", 8), "w", 24, 8)
    heads = builder.call(aten.unflatten.int, features, 1, [-1, 6])
    sizes = [2, 2] if dim == 1 else [3, 3]
    parts = builder.call(aten.split_with_sizes.default, heads, sizes, dim)
    first, second = (builder.part(parts, place) for place in range(2))
    result = builder.call(aten.mul.Tensor, first, second)
    if read_twice:
        whole = builder.call(aten.flatten.using_ints, heads, 1, 2)
        result = builder.call(
            aten.cat.default, [builder.call(aten.flatten.using_ints, result, 1, 2), whole], 1
        )
    report = SplitHeads().apply(builder.done(result))
    assert report.matches == 0
    assert reason in nearest(report)


@pytest.mark.parametrize(
    ("read", "dim", "reason"),
    [
        ("once", 1, None),
        ("twice", 1, "a node other than %cat reads it"),
        ("by the tokens", 0, None),
    ],
)
def test_parts_that_are_concatenated(read: str, dim: int, reason: str | None) -> None:
    """They come from one linear, unless another node needs one of them."""
    builder = GraphBuilder()
    features = builder.linear(builder.input("x", 4, 8), "w", 24, 8)
    heads = builder.call(aten.unflatten.int, features, 1, [-1, 6])
    parts = builder.call(aten.split_with_sizes.default, heads, [3, 3], -1)
    merged = [builder.call(aten.flatten.using_ints, builder.part(parts, n), 1, 2) for n in range(2)]
    result = builder.call(aten.cat.default, merged, dim)
    if read == "twice":
        result = builder.call(
            aten.cat.default, [result, builder.call(aten.neg.default, merged[0])], 1
        )
    gm = builder.done(result)
    report = SplitHeads().apply(gm)
    assert report.matches == 1
    assert check_graph(gm) == []
    assert len(calls(gm, LINEAR)) == (1 if read == "once" else 2)
    assert (reason is None and report.nearest is None) or reason in str(report.nearest)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
def test_fused_projections_are_linears_of_their_own(bias: bool, sliced: bool) -> None:
    """Phi-3 slices queries, keys and values; its gate and up are the halves of one linear."""
    builder = GraphBuilder()
    features = builder.linear(builder.input("x", 4, 8), "w", 24, 8, bias)
    if sliced:
        pair = [
            builder.call(aten.slice.Tensor, features, -1, *ends) for ends in ((0, 12), (12, 24))
        ]
    else:
        halves = builder.call(aten.split_with_sizes.default, features, [12, 12], 1)
        pair = [builder.part(halves, place) for place in range(2)]
    gm = builder.done(builder.call(aten.sub.Tensor, *pair))
    parameters = {"weight": torch.randn(24, 8), "bias": torch.randn(24)}
    x = torch.randn(4, 8)
    whole = x @ parameters["weight"].T + (parameters["bias"] if bias else 0)
    assert SplitHeads().apply(gm).matches == 1
    assert check_graph(gm) == []
    assert len(calls(gm, LINEAR)) == 2
    for node in gm.graph.find_nodes(op="get_attr"):
        recipe = parameter_of(node).whole
        assert isinstance(recipe, Slice) and isinstance(recipe.source, Tensor)
        rows = parameters[recipe.source.name.removeprefix("w.")][recipe.start : recipe.stop]
        setattr(gm, str(node.target), torch.nn.Parameter(rows, requires_grad=False))
    gm.recompile()
    torch.testing.assert_close(gm(x), whole[:, :12] - whole[:, 12:])


@pytest.mark.parametrize("reader", ["whole", "tokens", "every other feature"])
def test_linears_that_are_not_fused_stay(reader: str) -> None:
    builder = GraphBuilder()
    features = builder.linear(builder.input("x", 4, 8), "w", 24, 8)
    part = builder.call(aten.slice.Tensor, features, 1, 0, 12)
    other = {
        "whole": lambda: builder.call(aten.neg.default, features),
        "tokens": lambda: builder.call(aten.slice.Tensor, features, 0, 0, 4),
        "every other feature": lambda: builder.call(aten.slice.Tensor, features, 1, 0, 24, 2),
    }[reader]()
    gm = builder.done(builder.call(aten.cat.default, [part, other], 1))
    assert SplitHeads().apply(gm).matches == 0
    assert len(calls(gm, LINEAR)) == 1


def test_transposed_heads_are_split() -> None:
    """GPT-NeoX puts heads before the tokens, then splits each into its query, key and value."""
    builder = GraphBuilder()
    features = builder.linear(builder.input("x", 4, 8), "w", 36, 8)
    heads = builder.call(
        aten.transpose.int, builder.call(aten.unflatten.int, features, 1, [-1, 9]), 0, 1
    )
    parts = builder.call(aten.split_with_sizes.default, heads, [3, 3, 3], -1)
    query, key, value = (builder.part(parts, place) for place in range(3))
    total = builder.call(aten.mul.Tensor, builder.call(aten.mul.Tensor, query, key), value)
    gm = builder.done(total)
    weight, x = torch.randn(36, 8), torch.randn(4, 8)
    expected = (x @ weight.T).view(4, 4, 3, 3).transpose(0, 1).prod(2)
    assert SplitHeads().apply(gm).matches == 1
    assert check_graph(gm) == []
    assert len(calls(gm, LINEAR)) == 3
    for place, node in enumerate(map(weight_of, calls(gm, LINEAR))):
        rows = weight.view(4, 3, 3, 8)[:, place].flatten(0, 1)
        setattr(gm, str(node.target), torch.nn.Parameter(rows, requires_grad=False))
    gm.recompile()
    torch.testing.assert_close(gm(x), expected)
