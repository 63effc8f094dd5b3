"""A decode step of linear attention becomes one op, which updates tails and states."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.backends.reference.step_models import with_delta_apart
from tests.passes.decoding import decode_step
from tests.stages import until
from tpcompile.ir.meta import origin_of
from tpcompile.ir.ops import (
    DELTA_STEP,
    DELTA_STEP_APART,
    RESUMED_CONV,
    RESUMED_DELTA_RULE,
    arguments_of,
)
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.rewriting.manager import run_passes
from tpcompile.rewriting.rewrite import calls

MODEL, NAME = "tiny-qwen3.5", "fuse-delta-step"


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("passes/fuse_delta_step.txt", decode_step(NAME, MODEL, 1).plain.diff("layer 1"))


def test_matches_every_layer_of_linear_attention() -> None:
    current = decode_step(NAME, MODEL).plain
    assert current.matches == 3
    gm = current.after.graph
    assert not calls(gm, RESUMED_CONV) and not calls(gm, RESUMED_DELTA_RULE)
    assert [arguments_of(node)["layer"] for node in calls(gm, DELTA_STEP)] == [0, 1, 2]
    assert decode_step(NAME, "tiny-qwen3").plain.matches == 0


@pytest.mark.parametrize("tp", [1, 3])
def test_channels_and_gates_of_separate_linears(tp: int) -> None:
    """The op then reads both, and gives the same results."""
    current = decode_step(NAME, MODEL, tp).plain
    passes = with_delta_apart(until(decode_pipeline(tp), NAME))
    _, stages = run_passes(current.pair.captured.graph, passes)
    gm = stages[-1].graph
    assert not calls(gm, DELTA_STEP) and not calls(gm, RESUMED_CONV)
    for node in calls(gm, DELTA_STEP_APART):
        bound = arguments_of(node)
        origins = [origin_of(bound[name]).module.rpartition(".")[2] for name in ("projected", "z")]
        assert origins == ["in_proj_qkv", "in_proj_z"]
    assert stages[-1].stats.matches == 3


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_numbers(tp: int) -> None:
    """Logits, caches, tails and states agree, for new sequences and for those with a past."""
    decode_step(NAME, MODEL, tp).assert_near()


def test_again() -> None:
    assert decode_step(NAME, MODEL).plain.again().matches == 0


def test_inputs_of_separate_linears_are_not_fused() -> None:
    """The gates of heads, shares and decays, come from one linear."""
    step = decode_step(NAME, MODEL, 1).plain
    passes = [item for item in until(decode_pipeline(1), NAME) if item.name != "fuse-delta"]
    _, stages = run_passes(step.pair.captured.graph, passes)
    assert stages[-1].stats.matches == 0
