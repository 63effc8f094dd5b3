"""The inputs of linear attention are computed by two linears."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.models import NEXT
from tests.passes.graphs import nearest
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import parameter_of, set_parameter
from tpcompile.ir.ops import LINEAR
from tpcompile.ir.simulate import materialise
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import weight_of

MODEL, NAME = "tiny-qwen3.5", "fuse-delta"


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("passes/fuse_delta.txt", step(NAME, MODEL, 2).diff("layer 1"))


def test_matches_twice_a_layer() -> None:
    assert step(NAME, MODEL).matches == 6
    assert step(NAME, "tiny-qwen3").matches == 0


@pytest.mark.parametrize("model", [MODEL, NEXT])
@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_numbers(tp: int, model: str) -> None:
    assert step(NAME, model, tp).matches == 6
    step(NAME, model, tp).assert_near()


def test_again() -> None:
    """A second run does not match, since channels then come from a split."""
    reason = nearest(step(NAME, MODEL, 2).again())
    assert "the projection of its channels must be a separate linear" in reason


@pytest.mark.parametrize("tp", [1, 2, 5])
def test_each_rank_has_its_own_rows_of_both(tp: int) -> None:
    """Trap 2: a rank has its channels and then its gates, not a run of the joined rows."""
    current = step(NAME, MODEL, tp)
    before, after = (
        materialise(s.graph, current.pair.read) for s in (current.before, current.after)
    )
    for joined, parts in (("qkv_z", ("qkv", "z")), ("b_a", ("b", "a"))):
        weights = [before[f"l2_in_proj_{part}_weight"] for part in parts]
        for rank, rows in enumerate(after[f"l2_in_proj_{joined}_weight"]):
            assert torch.equal(rows, torch.cat([part[rank] for part in weights]))


def test_ranks_with_each_others_rows_do_not_pass_the_checker() -> None:
    gm = clone(step(NAME, MODEL, 2).after.graph)
    weight = next(w for w in map(weight_of, calls(gm, LINEAR)) if str(w.target) == WEIGHT)
    parameter = parameter_of(weight)
    set_parameter(
        weight, parameter.__class__(parameter.type, parameter.whole, parameter.shards[::-1])
    )
    assert {problem.rule for problem in check_graph(gm)} == {"recipe"}


WEIGHT = "l0_in_proj_qkv_z_weight"
