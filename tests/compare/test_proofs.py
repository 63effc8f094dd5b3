"""What a comparison says of proofs, before what it measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import fx

from tests.models import preset_pair
from tpcompile.compare.model import compare_with_eager
from tpcompile.compare.program import Batch, compare_program
from tpcompile.compare.proofs import Proofs
from tpcompile.ir.ops import SWIGLU
from tpcompile.passes import Report, default_pipeline, parse_pipeline
from tpcompile.passes.pipeline import for_ranks
from tpcompile.rewriting.rewrite import calls
from tpcompile.vm.proof.computes import Computed


@dataclass(frozen=True)
class Swapped:
    """A pass of another package that exchanges gate and up."""

    name: ClassVar[str] = "swapped"

    def apply(self, gm: fx.GraphModule) -> Report:
        for node in calls(gm, SWIGLU):
            node.args = node.args[::-1]
        return Report(1)


def test_the_passes_of_a_comparison() -> None:
    comparison = compare_with_eager(
        preset_pair("tiny-qwen2").eager, default_pipeline(2), simulate=True
    )
    first, second, third, *_ = comparison.table().splitlines()
    assert first == "proved: 21 passes, after which the graph computes what was captured"
    assert second == (
        "  with the rewrites bias-after-sum (shard-linears), "
        "norm-before-rounding (fuse-add-norm), without-past (cache-kv)"
    )
    assert third == "measured: the capture beside eager, rounding, and the modules"


def test_a_pass_that_is_not_proved() -> None:
    passes = [*default_pipeline(1), Swapped()]
    comparison = compare_with_eager(preset_pair("tiny-qwen2").eager, passes, simulate=True)
    told = comparison.proofs.text()
    assert "proved: 21 passes" in told
    gate, up = (f"%l0_{name}_proj[i, j]" for name in ("gate", "up"))
    assert "NOT proved: swapped: it declares no rewrites, and %l0_swiglu has %l0_" in told
    assert (
        f": before the pass %l0_swiglu = {up} · silu({gate}); "
        f"after it %l0_swiglu = {gate} · silu({up})"
    ) in told
    *earlier, last = comparison.to_json()["proof"]["passes"]
    assert all(entry["proved"] for entry in earlier)
    assert (last["name"], last["proved"]) == ("swapped", False)
    assert last["reason"].startswith("it declares no rewrites")
    assert not comparison.ok, "what is not proved is measured"


def test_the_program_of_a_comparison() -> None:
    passes = for_ranks(parse_pipeline("decode{spans=2,block=8}"), 1)
    comparison = compare_program(
        preset_pair("tiny-qwen2").eager, passes, Batch((3,), 1, 0), workers=1
    )
    assert comparison.to_json()["proof"]["program"] is True
    told = comparison.table().splitlines()
    assert "proved: the program computes the graph" in told
    assert "measured: the capture beside eager, rounding, and the executors" in told


@pytest.mark.parametrize("name", ["my_kind", ""])
def test_a_program_without_a_proof(name: str) -> None:
    computed = Computed(unproved=(name,)) if name else Computed(was_checked=False)
    proofs = Proofs(program=computed)
    assert proofs.to_json()["program"] is False
    assert f"NOT proved: the program: {computed.summary}" in proofs.text()
