"""The plan, read off the types of a sharded graph."""

from __future__ import annotations

import pytest

from tests.inspect.stages import captured, graph
from tests.models import preset_pair
from tpcompile.inspect.plan import plan_report
from tpcompile.ir.simulate import materialise


@pytest.mark.parametrize("tp", [1, 3, 5])
def test_weight_bytes_are_what_the_ranks_hold(tp: int) -> None:
    gm = graph(tp)
    weights = materialise(gm, preset_pair("tiny-qwen3").read)
    for share in plan_report(gm).ranks:
        held = sum(shards[share.rank].nbytes for shards in weights.values())
        assert share.weight_bytes == held


def test_sums_and_gathers() -> None:
    report = plan_report(graph(3))
    ops = [collective.op for collective in report.collectives]
    assert ops == ["all_reduce"] * 5 + ["all_gather", "argmax"]
    sums = {c.bytes_per_token for c in report.collectives if c.op == "all_reduce"}
    assert sums == {2 * 64 * 4 * 2 // 3}, "around a ring of 3, twice 2/3 of the value"
    logits, tokens = report.collectives[-2:]
    assert logits.bytes_per_token == 1013 * 4 * 2 // 3
    assert tokens.bytes_per_token == 16 * 2, "a pair from each of the two others"


def test_a_graph_not_yet_planned_is_one_rank() -> None:
    report = plan_report(captured())
    (share,) = report.ranks
    assert (share.q_heads, share.kv_heads, share.vocab) == (6, 2, 1013)
    assert report.collectives == ()
    assert "around a ring" not in report.table()
