"""Linears are column-parallel in and row-parallel out, and a row-parallel bias is added once."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import fx
from transformers import LlamaConfig

from tests.captures import captured_once
from tests.models import (
    TOLERANCE,
    VOCABULARY,
    Pair,
    batch,
    eager_logits,
    padded,
    pair_of,
    preset_pair,
    relative_error,
    stage_logits,
)
from tests.passes.graphs import attention_graph, refusal
from tests.passes.steps import step
from tests.stages import graph_after, stages_of, until
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import operand, parameter_of, placement_of, value_type
from tpcompile.ir.ops import REDISTRIBUTE, arguments_of
from tpcompile.ir.types import PARTIAL, REPLICATE, Shard
from tpcompile.options import passes_for
from tpcompile.passes import default_pipeline, run_passes, shard_linears
from tpcompile.passes.shard_linears import ShardLinears
from tpcompile.rewriting.manager import FailedPassError
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import (
    attention_blocks,
    bias_of,
    expert_blocks,
    mlp_blocks,
    weight_of,
)
from tpcompile.runtime.model import CompiledModel

aten = torch.ops.aten


def _rounded(right: Any, *, sums: bool) -> Any:
    """Round what a pass sums, or its sum, to 16 bits."""

    def insert(after: fx.Node, target: Any, *args: Any) -> fx.Node:
        if target is not REDISTRIBUTE:
            return right(after, target, *args)  # type: ignore[no-any-return]
        if not sums:
            terms = right(after, aten.to.dtype, after, torch.bfloat16)
            return right(terms, target, terms, torch.float32)  # type: ignore[no-any-return]
        total = right(after, target, *args)
        return right(total, aten.to.dtype, total, torch.bfloat16)  # type: ignore[no-any-return]

    return insert


@pytest.mark.parametrize(
    ("function", "wrong", "dtype", "rule"),
    [
        ("_sum_dtype", lambda right: lambda dtype: (), torch.bfloat16, "sum-dtype"),
        ("insert_after", partial(_rounded, sums=False), torch.float32, "rounded-terms"),
        ("insert_after", partial(_rounded, sums=True), torch.bfloat16, "values"),
    ],
)
def test_terms_that_are_rounded_before_their_sum_is_complete_are_refused(
    function: str, wrong: Any, dtype: Any, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is in fp32, over terms as linears return them, and includes the bias."""
    config = biased_llama().eager.config
    passes = default_pipeline(2)
    run_passes(captured_once(config, dtype=dtype).graph, passes)
    monkeypatch.setattr(shard_linears, function, wrong(getattr(shard_linears, function)))
    with pytest.raises(FailedPassError) as caught:
        run_passes(captured_once(config, dtype=dtype).graph, passes)
    problem = caught.value.problems[0]
    assert problem.rule == rule and problem.node.startswith("l0_"), problem
    assert len(problem.others) == 3, "and the MLP, and both in the other layer"


@lru_cache(maxsize=1)
def biased_llama() -> Pair:
    """Return a Llama with biases in all layer linears, and with few heads and uneven widths."""
    return pair_of(
        LlamaConfig(
            hidden_size=40,
            intermediate_size=70,
            num_hidden_layers=2,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=8,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        )
    )


def test_one_rank_keeps_everything() -> None:
    assert step("shard-linears", tp=1).matches == 0
    step("shard-linears", tp=1).assert_same_bits()


def test_columns_and_rows() -> None:
    """Output features into a block and input features out of it are split by the same layout."""
    graph = step("shard-linears").after.graph.graph
    pairs = [(b.query, b.output) for b in attention_blocks(graph)]
    pairs += [(m.gate, m.down) for m in mlp_blocks(graph)]
    for inward, outward in pairs:
        rows, columns = placement_of(weight_of(inward)), placement_of(weight_of(outward))
        assert isinstance(rows, Shard)
        assert isinstance(columns, Shard)
        assert (rows.dim, columns.dim) == (0, 1)
        assert rows.layout == columns.layout
        assert placement_of(outward) == PARTIAL


def test_qkv_bias_goes_with_the_rows_of_its_weight() -> None:
    for block in attention_blocks(step("shard-linears", "tiny-qwen2").after.graph.graph):
        bias = bias_of(block.query)
        assert bias is not None
        assert placement_of(bias) == placement_of(weight_of(block.query))


def test_heads_are_whole() -> None:
    for block in attention_blocks(step("shard-linears").after.graph.graph):
        layout = value_type(weight_of(block.query)).layout_of(0)
        assert isinstance(layout, Layout)
        assert layout.grain == 16


def test_a_plan_must_come_first() -> None:
    message = refusal(ShardLinears(), attention_graph())
    assert "The graph has no plan" in message
    assert "Put plan-sharding before this pass" in message


def test_the_bias_of_a_row_parallel_linear_is_added_behind_the_sum() -> None:
    gm = graph_after(biased_llama(), until(default_pipeline(2), "shard-linears"))
    for total in calls(gm, REDISTRIBUTE):
        assert len(operand(total).args) == 2  # the linear has no bias any more
        (added,) = total.users
        assert added.target is aten.add.Tensor
        bias = added.args[1]
        assert isinstance(bias, torch.fx.Node)
        assert parameter_of(bias).describe().endswith(("o_proj.bias", "down_proj.bias"))


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_a_bias_on_every_linear_counts_once(tp: int) -> None:
    pair = biased_llama()
    stages = stages_of(pair, default_pipeline(tp))
    gm = stages[-1].graph
    lengths = (1, 4, 2)
    expected = eager_logits(pair.eager, lengths)
    assert relative_error(stage_logits(gm, pair, batch(lengths)), expected) < TOLERANCE
    ids, mask = padded(lengths)
    emitted = CompiledModel.simulated(pair.captured, gm, stages, pair.read)(
        ids, attention_mask=mask
    )
    assert relative_error(emitted.logits[mask.bool()], expected) < TOLERANCE


def test_a_bias_that_counted_twice_would_show() -> None:
    """The biases are large enough for the test above to detect one that is added twice."""
    pair = biased_llama()
    gm = graph_after(pair, default_pipeline(2))
    for node in list(gm.graph.nodes):
        if node.op == "get_attr" and "o_proj.bias" in parameter_of(node).describe():
            (added,) = node.users
            with gm.graph.inserting_after(added):
                twice = gm.graph.call_function(aten.add.Tensor, (added, node))
            twice.meta["type"] = added.meta["type"]
            added.replace_all_uses_with(
                twice, delete_user_cb=lambda user, new=twice: user is not new
            )
    lengths = (1, 4, 2)
    logits = stage_logits(gm, pair, batch(lengths))
    assert relative_error(logits, eager_logits(pair.eager, lengths)) > 100 * TOLERANCE


@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_a_mixture_has_one_sum(experts: str) -> None:
    """Results of experts and of the shared one are added on each rank, and then summed once."""
    passes = until(passes_for(None, 3, experts=experts), "shard-linears")
    gm = graph_after(preset_pair("tiny-qwen3.5-moe"), passes)
    blocks = expert_blocks(gm.graph)
    assert len(blocks) == 4
    assert len(calls(gm, REDISTRIBUTE)) == 2 * 4  # a mixer and a mixture in each layer
    for block in blocks:
        assert block.shared is not None and block.shared_gate is not None
        assert block.total.target is aten.add.Tensor
        assert [user.target for user in block.total.users] == [REDISTRIBUTE]
        for term in (block.experts, block.shared, block.total):
            assert placement_of(term) == PARTIAL
        for whole in (block.router, block.shared_gate, weight_of(block.router)):
            assert placement_of(whole) == REPLICATE
        weights = [arguments_of(block.experts)[name] for name in ("gate_up", "down")]
        dims = [placement.dim for w in weights if isinstance(placement := placement_of(w), Shard)]
        assert dims == ([1, 2] if experts == "tp" else [0, 0])
    assert ShardLinears().apply(gm).matches == 0
