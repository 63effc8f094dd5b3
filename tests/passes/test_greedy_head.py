"""A second result, the best token per row, is computed without gathering the logits."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tests.models import batch, preset_pair, run
from tests.passes.graphs import GraphBuilder, refusal
from tests.passes.steps import TINY_VOCABULARY, step
from tests.stages import graph_after
from tpcompile.ir.checker import check_graph
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import ALL_GATHER, ALL_REDUCE, ARGMAX, LINEAR, REDISTRIBUTE
from tpcompile.ir.types import PARTIAL, REPLICATE
from tpcompile.passes import default_pipeline
from tpcompile.passes.greedy_head import GreedyHead
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import head_of, output_of


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_numbers(model: str, tp: int) -> None:
    """Logits keep their bits, and tokens are their argmax on all ranks."""
    current = step("greedy-head", model, tp)
    current.assert_same_bits()
    packed = batch((3, 1, 4), TINY_VOCABULARY)
    values = run(current.after.graph, current.pair, packed)
    for logits, tokens in values[output_of(current.after.graph.graph)]:
        assert torch.equal(tokens, logits.argmax(-1))


def test_the_graph_says_what_it_gives() -> None:
    gm = step("greedy-head").after.graph
    logits, tokens = info_of(gm).outputs
    assert (logits.shape, tokens.shape) == (("R", TINY_VOCABULARY), ("R",))
    assert tokens.dtype == torch.long and tokens.placement == REPLICATE
    assert len(info_of(step("greedy-head").before.graph).outputs) == 1


@pytest.mark.parametrize("tp", [1, 4])
def test_tokens_are_found_before_the_logits_are_gathered(tp: int) -> None:
    gm = step("greedy-head", tp=tp).after.graph
    (tokens,) = calls(gm, ARGMAX)
    assert operand(tokens) is head_of(gm.graph)
    assert (operand(output_of(gm.graph)).target is ALL_GATHER) == (tp > 1)


def test_a_gather_that_is_only_wished_for_is_passed_by_too() -> None:
    """Before insert-collectives the argmax reads the shards too, bypassing the redistribute."""
    passes = default_pipeline(3)
    place = [current.name for current in passes].index("insert-collectives")
    gm = graph_after(preset_pair("tiny-qwen3"), [*passes[:place], GreedyHead()])
    assert operand(output_of(gm.graph)).target is REDISTRIBUTE
    assert operand(calls(gm, ARGMAX)[0]) is head_of(gm.graph)


@pytest.mark.parametrize("place", [5, 6, 8, 9])
def test_another_place_gives_the_same_tokens(place: int) -> None:
    pair = preset_pair("tiny-qwen3")
    passes = [current for current in default_pipeline(3) if current.name != "greedy-head"]
    gm = graph_after(pair, [*passes[:place], GreedyHead(), *passes[place:]])
    values = run(gm, pair, batch((3, 4), TINY_VOCABULARY))
    for logits, tokens in values[output_of(gm.graph)]:
        assert torch.equal(tokens, logits.argmax(-1))


def summed() -> fx.GraphModule:
    """Return logits that are partial sums."""
    builder = GraphBuilder()
    head = builder.linear(builder.input("x", "R", 16), "head", 40, 16)
    head.meta["type"] = value_type(head).placed(PARTIAL)
    return builder.done(builder.call(ALL_REDUCE, head))


@pytest.mark.parametrize("wished", [False, True])
def test_logits_that_are_a_sum_are_summed_first(wished: bool) -> None:
    """The argmax of partial logits reads the sum, since a term does not determine the maximum."""
    gm = summed()
    total = operand(output_of(gm.graph))
    if wished:
        total.target = REDISTRIBUTE
    assert GreedyHead().apply(gm).matches == 1
    assert operand(calls(gm, ARGMAX)[0]) is total


def test_logits_without_rows_are_refused() -> None:
    """Captured logits, which still have a batch dimension, are refused."""
    builder = GraphBuilder()
    gm = builder.done(builder.linear(builder.input("x", 1, "R", 16), "head", 40, 16))
    message = refusal(GreedyHead(), gm)
    assert "%linear must have one row per token" in message
    assert "after canonicalize" in message
    assert not calls(gm, ARGMAX)


def test_on_one_rank_the_logits_are_read() -> None:
    builder = GraphBuilder()
    gm = builder.done(builder.linear(builder.input("x", "R", 16), "head", 40, 16))
    assert GreedyHead().apply(gm).matches == 1
    assert check_graph(gm) == []
    assert operand(calls(gm, ARGMAX)[0]).target is LINEAR
