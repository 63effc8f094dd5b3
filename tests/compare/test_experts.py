"""Mixtures of experts: changed choices within rounding pass, and mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tests.compare.mistakes_of_experts import MISTAKES, tied
from tests.mixtures import FAMILIES, lively_mixture, random_mixture
from tpcompile.compare import model as compare
from tpcompile.compare.comparison import Comparison
from tpcompile.ir.ops.experts import top_experts
from tpcompile.passes import default_pipeline, run_passes

pytestmark = pytest.mark.usefixtures("forked_launchers")

TP = 2


def compared(model: Any, tp: int = TP, **options: Any) -> Comparison:
    return compare.compare_with_eager(model, default_pipeline(tp), **{"simulate": True, **options})


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[fx.GraphModule], None]) -> None:
    def spoilt(graph: fx.GraphModule, passes: Any, **more: Any) -> Any:
        gm, stages = run_passes(graph, passes, **more)
        change(gm)
        return gm, stages

    monkeypatch.setattr(compare, "run_passes", spoilt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ties_change_choices_and_nothing_else(dtype: torch.dtype) -> None:
    comparison = compared(tied(dtype))
    assert comparison.ok, comparison.table()
    changed = [choice for choices in comparison.choices for choice in choices.changed]
    assert {choice.side for choice in changed} >= {"graph", "emitted"}
    assert {choice.layer for choice in changed} == {0, 1}
    assert {choice.step for choice in changed} > {0}
    assert any(choice.margin == 0 for choice in changed) and all(choice.ok for choice in changed)
    lines = comparison.table().splitlines()
    first, second = lines[lines.index(comparison.proofs.text().splitlines()[-1]) + 1 :][:2]
    assert f"{len(changed)} changed choices of 186" in first
    assert "experts" in second and "instead of" in second
    assert [row.node for row in comparison.rows if row.node.endswith("_ids")] == [
        "l0_top_experts_ids",
        "l1_top_experts_1_ids",
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_near_ties_in_bf16(family: str) -> None:
    """With many experts, some logits of each token are within rounding of each other."""
    config = random_mixture(1, family, num_experts=64, num_experts_per_tok=8)
    comparison = compared(lively_mixture(config, 1, torch.bfloat16))
    assert comparison.ok, comparison.table()
    assert any(choices.changed for choices in comparison.choices)


def test_ranks_in_processes_follow_eager() -> None:
    comparison = compared(tied(torch.bfloat16), simulate=False)
    assert comparison.ok, comparison.table()
    assert any(
        choices.place.side == "emitted" and choices.changed for choices in comparison.choices
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_found_at_their_place(
    mistake: Callable[[fx.GraphModule], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, mistake)
    comparison = compared(tied(dtype))
    first = comparison.first_divergence
    assert first is not None
    assert (first.node, first.layer) == (MISTAKES[mistake][0], 1)


def _least(logits: torch.Tensor, count: int, normalized: bool) -> tuple[Any, torch.Tensor]:
    return top_experts(-logits, count, normalized)


def test_a_wrong_choice_of_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a run with eager's choices do not show it; its own choices do."""
    from tpcompile.backends.torch_tp import router

    monkeypatch.setattr(router, "top_experts", _least)
    first = compared(tied(torch.float32)).first_divergence
    assert first is not None and first.node == "emitted, experts"
    assert "the largest of the side's own logits" in first.problem


def test_a_choice_beyond_the_error_of_the_logits_fails() -> None:
    """With a tolerance of zero, only equal logits may be swapped."""
    comparison = compared(tied(torch.bfloat16), tolerance=0.0)
    changed = [choice for choices in comparison.choices for choice in choices.changed]
    assert {choice.ok for choice in changed} >= {True}
    assert all(choice.ok == (choice.margin == 0) for choice in changed)
