"""Each rank keeps exactly the KV heads that its query heads read."""

from __future__ import annotations

import pytest
import torch

from tests.passes.graphs import attention_graph, refusal
from tests.passes.steps import step
from tests.stages import until
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import operand, parameter_of, set_parameter, value_type
from tpcompile.ir.ops import ATTENTION
from tpcompile.passes.kv_heads import KvHeads
from tpcompile.passes.pipeline import default_pipeline
from tpcompile.rewriting.manager import FailedPassError, run_passes
from tpcompile.rewriting.rewrite import Report, calls
from tpcompile.rewriting.structure import attention_blocks, bias_of, weight_of


def test_one_rank_keeps_everything() -> None:
    assert step("kv-heads", tp=1).matches == 0


@pytest.mark.parametrize("tp", [2, 3, 4, 5, 6])
def test_each_rank_holds_what_its_query_heads_read(tp: int) -> None:
    """6 query heads on 2 KV heads: at tp=4 rank 1 has heads 2 and 3, which read both."""
    for node in calls(step("kv-heads", tp=tp).after.graph, ATTENTION):
        queries, keys, values = (value_type(operand(node, i)).layout_of(1) for i in range(3))
        assert isinstance(queries, Layout)
        assert isinstance(keys, Layout)
        assert keys == values
        for rank in range(tp):
            assert keys.units_of(rank) == sorted({head // 3 for head in queries.units_of(rank)})


def test_a_bias_goes_with_the_rows_of_its_weight() -> None:
    for block in attention_blocks(step("kv-heads", "tiny-qwen2").after.graph.graph):
        for linear in (block.key, block.value):
            bias = bias_of(linear)
            assert bias is not None
            layout = value_type(weight_of(linear)).layout_of(0)
            assert value_type(bias).layout_of(0) == layout is not None


def test_a_plan_must_come_first() -> None:
    message = refusal(KvHeads(), attention_graph())
    assert "The graph has no plan" in message
    assert "Put plan-sharding before this pass" in message


class _NextRanksHeads(KvHeads):
    """Broken pass that assigns KV heads by rank rather than by query heads."""

    def apply(self, gm: torch.fx.GraphModule) -> Report:
        report = super().apply(gm)
        for block in attention_blocks(gm.graph):
            for linear in (block.key, block.value):
                weight = weight_of(linear)
                layout = value_type(weight).layout_of(0)
                assert isinstance(layout, Layout)
                turned = (*layout.parts[1:], layout.parts[0])
                wrong = Layout(layout.axis, layout.units, layout.grain, turned)
                set_parameter(weight, parameter_of(weight).sharded(0, wrong))
        return report


def test_the_wrong_kv_heads_do_not_pass_the_checker() -> None:
    passes = until(default_pipeline(2), "shard-linears")
    with pytest.raises(FailedPassError) as failed:
        run_passes(step("kv-heads").pair.captured.graph, [*passes, _NextRanksHeads()])
    assert {problem.rule for problem in failed.value.problems} == {"kv-heads"}
    assert "rank 0 holds KV heads [1] for query heads [0, 1, 2]" in str(failed.value)
