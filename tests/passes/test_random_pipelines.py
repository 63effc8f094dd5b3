"""Random pipelines preserve the captured numbers, or are refused with a reason about the order."""

from __future__ import annotations

import pytest

from benchmarks.random_pipelines import MODELS, outcomes, subject
from tpcompile.errors import CompileError
from tpcompile.passes import for_ranks, parse_pipeline, run_passes
from tpcompile.rewriting.manager import FailedPassError


def mistakes(count: int, seed: int) -> list[str]:
    return [str(outcome) for outcome in outcomes(count, seed) if outcome.is_mistake]


def test_a_random_pipeline_is_right_or_is_refused_for_its_order() -> None:
    assert mistakes(60, seed=9) == []


@pytest.mark.slow
def test_more_random_pipelines() -> None:
    assert mistakes(3000, seed=10) == []


_RAISED = "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention,plan-sharding"


@pytest.mark.parametrize(
    ("text", "order"),
    [
        (f"{_RAISED},kv-heads,shard-linears", "kv-heads must run after shard-linears"),
        (
            f"{_RAISED},shard-linears,insert-collectives,fuse-norm-linear,vocab-parallel",
            "vocab-parallel must run before fuse-norm-linear",
        ),
        ("canonicalize,vocab-parallel", "vocab-parallel must run after plan-sharding"),
        (
            "canonicalize,raise-attention",
            "raise-attention must run after raise-norm and raise-rope",
        ),
        (f"{_RAISED},fuse-qkv,shard-linears", "shard-linears must run before fuse-qkv"),
        (
            "canonicalize,raise-norm,raise-rope,raise-swiglu,plan-sharding",
            "plan-sharding must run after raise-attention",
        ),
        (f"{_RAISED},fuse-qkv,interleave-rotary", "interleave-rotary must run before fuse-qkv"),
        (
            "canonicalize,raise-norm,raise-experts,fuse-experts,plan-sharding",
            "plan-sharding must run before fuse-experts",
        ),
    ],
)
@pytest.mark.parametrize("model", MODELS[:2])
def test_the_order_is_named(model: str, text: str, order: str) -> None:
    with pytest.raises(CompileError) as refused:
        run_passes(subject(model).captured.graph, for_ranks(parse_pipeline(text), 2))
    assert not isinstance(refused.value, FailedPassError)
    assert order in str(refused.value)
