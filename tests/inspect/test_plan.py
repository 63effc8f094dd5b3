"""Tests of the plan report, which is derived from the types of a sharded graph."""

from __future__ import annotations

import pytest

from tests.inspect.stages import captured, graph
from tests.models import preset_pair
from tpcompile.inspect.plan import plan_report
from tpcompile.ir.simulate import materialise
from tpcompile.options import passes_for
from tpcompile.passes import decode_pipeline, pipeline_text, run_passes
from tpcompile.passes.pipeline import decoding


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
    assert sums == {2 * 64 * 4 * 2 // 3}, "a ring of 3 sends twice 2/3 of the value"
    logits, tokens = report.collectives[-2:]
    assert logits.bytes_per_token == 1013 * 4 * 2 // 3
    assert tokens.bytes_per_token == 16 * 2, "one pair from each of the two other ranks"


@pytest.mark.parametrize(
    ("experts", "count", "features"), [("tp", [8, 8, 8], [16] * 3), ("ep", [3, 3, 2], [48] * 3)]
)
@pytest.mark.parametrize(("name", "layers"), [("tiny-qwen3-moe", 2), ("tiny-qwen3.5-moe", 4)])
def test_shares_of_experts(
    name: str, layers: int, experts: str, count: list[int], features: list[int]
) -> None:
    """An expert has three matrices, with a width of 64 and 4 bytes per element."""
    passes = passes_for(None, 3, experts=experts)
    prompts, decode = [
        plan_report(run_passes(preset_pair(name).captured.graph, pipeline)[0])
        for pipeline in (passes, decoding(passes))
    ]
    assert decode.ranks == prompts.ranks and decode.expert_plans == prompts.expert_plans
    assert [share.experts for share in prompts.ranks] == count
    assert [share.expert_ffn for share in prompts.ranks] == features
    assert [share.expert_bytes for share in prompts.ranks] == [
        layers * 3 * 64 * 4 * held * width for held, width in zip(count, features, strict=True)
    ]


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("options", ["", "{spans=3,interleaved=true}"])
def test_a_decode_graph_has_the_same_plan(tp: int, options: str) -> None:
    """A decode graph has the same plan, although its sums across ranks add the residual."""
    standard, decode = plan_report(graph(tp)), plan_report(graph(tp, f"decode{options}"))
    assert decode.ranks == standard.ranks
    crossing = [[(c.op, c.bytes_per_token) for c in p.collectives] for p in (standard, decode)]
    assert crossing[0] == crossing[1]
    assert decode.table() == standard.table()


@pytest.mark.parametrize("count", range(1, 6))
def test_every_stage_of_a_decode_step_has_the_same_plan(count: int) -> None:
    passes = pipeline_text(decode_pipeline(3)).split(",")
    report = plan_report(graph(3, ",".join(passes[: len(passes) - 5 + count])))
    assert report.ranks == plan_report(graph(3)).ranks


def test_a_graph_not_yet_planned_is_one_rank() -> None:
    report = plan_report(captured())
    (share,) = report.ranks
    assert (share.q_heads, share.kv_heads, share.vocab) == (6, 2, 1013)
    assert report.collectives == ()
    assert "around a ring" not in report.table()


def test_one_line_at_a_prompt() -> None:
    line = repr(plan_report(graph(5)))
    assert line.startswith("<plan of qwen3, tp=5: at most ")
    assert "\n" not in line and len(line) < 160
