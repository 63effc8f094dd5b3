"""The plan is attached without changing the graph; axes that cannot be split are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.models import preset_pair
from tests.passes.graphs import attention_graph
from tests.passes.steps import step
from tests.stages import graph_after
from tpcompile.errors import ShardingError, UsageError
from tpcompile.ir.info import info_of
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import parameter_of, parameters
from tpcompile.ir.plan import Plan
from tpcompile.passes import parse_pipeline
from tpcompile.passes.plan_sharding import PlanSharding

RAISED = "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention"


def _plan(options: str) -> Plan:
    passes = parse_pipeline(f"{RAISED},plan-sharding{{{options}}}")
    gm = graph_after(preset_pair("tiny-qwen3"), passes)
    plan = info_of(gm).plan
    assert isinstance(plan, Plan)
    return plan


def test_golden(golden: Callable[[str, str], None]) -> None:
    """Only the header changes: it states the number of ranks."""
    golden("passes/plan_sharding.txt", step("plan-sharding").diff() + _written(_plan("tp=4")))


def _written(plan: Plan) -> str:
    layouts: dict[str, Layout] = {f"ffn of %{name}": layout for name, layout in plan.ffn.items()}
    for name, heads in plan.heads.items():
        layouts |= {f"queries of %{name}": heads.queries, f"keys of %{name}": heads.keys}
    layouts["vocabulary"] = plan.vocab
    return "\n".join(f"{name}: {_parts(layout)}" for name, layout in layouts.items()) + "\n"


def _parts(layout: Layout) -> str:
    parts = " | ".join(str(layout.units_of(rank)) for rank in range(layout.ranks))
    runs = " | ".join(f"{a}:{b}" for part in layout.parts for a, b in part)
    return f"{layout.axis} of {layout.units}×{layout.grain}, " + (
        parts if layout.units < 10 else runs
    )


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_attentions_mlps_and_the_vocabulary(model: str) -> None:
    assert step("plan-sharding", model).matches == 2 + 2 + 1


def test_numbers() -> None:
    step("plan-sharding").assert_same_bits()
    step("plan-sharding").assert_near()


def test_again() -> None:
    """A second run creates the same plan, and reports as many matches."""
    assert step("plan-sharding").again().matches == 5


def test_every_rank_has_a_recipe_for_every_parameter() -> None:
    for node in parameters(step("plan-sharding").after.graph.graph):
        parameter = parameter_of(node)
        assert parameter.shards == (parameter.whole,) * 4


def test_fewer_than_no_ranks_mean_nothing() -> None:
    with pytest.raises(UsageError, match="tp must be a positive int, got -1"):
        _plan("tp=-1")


def test_tp_above_the_query_heads_is_refused() -> None:
    with pytest.raises(
        ShardingError, match="tp=7 is more than the number of query heads"
    ) as refused:
        _plan("tp=7")
    message = str(refused.value)
    assert "6 query heads" in message
    assert "plan-sharding{tp=7}" in message


@pytest.mark.parametrize(
    ("options", "axis"),
    [
        ("tp=4,ffn_grain=100", "ffn of 176"),
        ("tp=4,ffn_grain=88", "ffn of 176"),
        ("tp=2,vocab_grain=8", "vocab of 1013"),
    ],
)
def test_a_grain_that_does_not_fit_is_refused(options: str, axis: str) -> None:
    with pytest.raises(ShardingError, match=f"The axis {axis} cannot be split"):
        _plan(options)


def test_an_asked_grain_is_kept() -> None:
    plan = _plan("tp=4,ffn_grain=16,vocab_grain=1")
    for layout in plan.ffn.values():
        assert [layout.extent(rank) for rank in range(4)] == [48, 48, 48, 32]
    assert plan.vocab.grain == 1


def test_a_graph_without_an_embedding_is_refused() -> None:
    with pytest.raises(ShardingError, match="The graph has 0 embeddings"):
        PlanSharding(tp=1).apply(attention_graph())


def test_a_graph_without_an_mlp_is_refused() -> None:
    with pytest.raises(ShardingError, match="no MLP to split over 2 ranks"):
        PlanSharding(tp=2).apply(attention_graph())
