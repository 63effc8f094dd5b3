"""Parts of heads, such as queries and their gates, come from linears of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.passes.graphs import GraphBuilder, nearest
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import parameter_of, set_parameter
from tpcompile.ir.ops import LINEAR
from tpcompile.ir.roles import HeadParts
from tpcompile.ir.simulate import materialise
from tpcompile.passes.split_heads import SplitHeads
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import weight_of

aten = torch.ops.aten
MODEL, NAME = "tiny-qwen3.5", "split-heads"
HEADS, WIDTH = 6, 16


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("passes/split_heads.txt", step(NAME, MODEL).diff("layer 1"))


def test_matches_every_layer_of_attention_with_gates() -> None:
    assert step(NAME, MODEL).matches == 1
    assert step(NAME, "tiny-qwen3").matches == 0


def test_numbers() -> None:
    step(NAME, MODEL).assert_near()


def test_again() -> None:
    assert step(NAME, MODEL).again().matches == 0


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


def test_a_gate_in_place_of_its_query_does_not_pass_the_checker() -> None:
    """The type of a parameter says which rows it has: another recipe of the same shape is seen."""
    gm = clone(step(NAME, MODEL).after.graph)
    parts = [
        weight
        for weight in map(weight_of, calls(gm, LINEAR))
        if isinstance(parameter_of(weight).type.role, HeadParts)
    ]
    one, other = (parameter_of(weight) for weight in parts)
    set_parameter(parts[0], replace(one, whole=other.whole, shards=other.shards))
    assert "recipe" in {problem.rule for problem in check_graph(gm)}


@pytest.mark.parametrize(
    ("read_twice", "dim", "said"),
    [
        (True, -1, "another node reads the whole heads"),
        (False, 1, "it splits no heads"),
    ],
)
def test_near_misses(read_twice: bool, dim: int, said: str) -> None:
    made = GraphBuilder()
    features = made.linear(made.input("x", "T", 8), "w", 24, 8)
    heads = made.call(aten.unflatten.int, features, 1, [-1, 6])
    sizes = [2, 2] if dim == 1 else [3, 3]
    parts = made.call(aten.split_with_sizes.default, heads, sizes, dim)
    first, second = (made.part(parts, place) for place in range(2))
    result = made.call(aten.mul.Tensor, first, second)
    if read_twice:
        whole = made.call(aten.flatten.using_ints, heads, 1, 2)
        result = made.call(
            aten.cat.default, [made.call(aten.flatten.using_ints, result, 1, 2), whole], 1
        )
    report = SplitHeads().apply(made.done(result))
    assert report.matches == 0
    assert said in nearest(report)
