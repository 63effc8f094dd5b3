"""Tests of comparing models: bf16 values are judged relative to fp32, ranks with each other."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import fx

from tests.runtime.eager_pair import lively
from tpcompile.compare import model as compare
from tpcompile.compare import source as sides
from tpcompile.compare.comparison import Comparison
from tpcompile.compare.rows import TOLERANCES
from tpcompile.errors import UnsupportedError
from tpcompile.ir.ops import PAGED_ATTENTION, SPECS
from tpcompile.passes import default_pipeline, run_passes
from tpcompile.rewriting.rewrite import calls
from tpcompile.runtime.ranks.rank import RankModule, rank_modules

pytestmark = pytest.mark.usefixtures("forked_launchers")


def _compared(dtype: torch.dtype, sharper: int = 1, **options: Any) -> Comparison:
    """Compare with attention scores multiplied by `sharper`, which amplifies errors as much."""
    model = lively("tiny-qwen3").to(dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.mul_(sharper)
    return compare.compare_with_eager(model, default_pipeline(3), **{"simulate": True, **options})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_that_layers_magnify_is_no_divergence(dtype: torch.dtype) -> None:
    """Errors beyond any fixed tolerance pass if eager's own error is as large."""
    comparison = _compared(dtype, sharper=8, seed=1)
    assert comparison.ok, comparison.table()
    largest = max(row.rel for row in comparison.rows)
    assert largest > TOLERANCES[dtype] * math.sqrt(1 + 2)  # two layers
    floats = [row for row in comparison.rows if row.node not in ("best tokens", "ranks", "tokens")]
    assert all(row.beside_fp32 for row in floats)
    assert "to fp32" in comparison.table()
    assert "fp32: eager in fp32, with the same weights\n" in comparison.table()
    assert max(row.eager_error for row in floats) > 0
    assert all(row.eager_error <= row.limit for row in floats)


def test_a_tolerance_takes_the_place_of_fp32() -> None:
    comparison = _compared(torch.bfloat16, tolerance=0.0)
    assert comparison.ok == all(row.rel == 0 for row in comparison.rows)
    assert all(row.ok == (row.rel == 0) for row in comparison.rows)
    assert not any(row.beside_fp32 for row in comparison.rows)
    assert "to fp32" not in comparison.table()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_mistake_in_bf16_is_found(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention scale that is wrong by a quarter is detected."""
    place = SPECS[PAGED_ATTENTION].argument_names.index("scale")

    def spoilt(graph: fx.GraphModule, passes: Any, **more: Any) -> Any:
        gm, stages = run_passes(graph, passes, **more)
        attention = calls(gm, PAGED_ATTENTION)[layer]
        attention.update_arg(place, 1.25 * attention.args[place])  # type: ignore[operator]
        return gm, stages

    monkeypatch.setattr(compare, "run_passes", spoilt)
    first = _compared(torch.bfloat16).first_divergence
    assert first is not None
    assert first.node == f"l{layer}_attention" and first.layer == layer


def test_a_graph_that_is_another_in_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = sides.capture

    def other(model: Any, dtype: torch.dtype | None = None) -> Any:
        captured = capture(model, dtype=dtype)
        if dtype == torch.float32:
            next(iter(captured.graph.graph.nodes)).name = "something"
        return captured

    monkeypatch.setattr(sides, "capture", other)
    with pytest.raises(UnsupportedError, match="fp32 graph differs from"):
        _compared(torch.bfloat16)


RESULTS = {"logits": "lm_head_whole", "tokens": "tokens"}
"""The names of the results in the generated module."""


@pytest.mark.parametrize(
    ("result", "simulate"), [("tokens", True), ("logits", True), ("logits", False)]
)
def test_ranks_that_differ_are_found(
    result: str, simulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong result on rank 1 is detected although rank 0 and all exchanged values are right."""
    name = RESULTS[result]

    def spoilt(graph: fx.GraphModule) -> list[RankModule]:
        first, second, *remaining = rank_modules(graph)
        source = second.source.replace(f"return {name}\n", f"return {name} + 1\n")
        assert source != second.source
        return [first, dataclasses.replace(second, source=source), *remaining]

    monkeypatch.setattr(compare, "rank_modules", spoilt)
    comparison = _compared(torch.float32, simulate=simulate)
    first = comparison.first_divergence
    assert first is not None
    assert (first.node, first.problem) == ("ranks", "ranks differ")
    assert first.max_abs > 0
    assert "FIRST DIVERGENCE at %ranks" in comparison.table()
