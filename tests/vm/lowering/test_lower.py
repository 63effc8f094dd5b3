"""Tests of lowering decode graphs: instructions, buffers and refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tests.backends.reference.step_models import EVEN
from tests.backends.reference.stepping import Case
from tests.models import preset_pair
from tests.stages import graph_after
from tpcompile.errors import UnsupportedError, UsageError, VerifyError
from tpcompile.ir.kv import ROUNDED
from tpcompile.ir.ops import NORM_GATE_UP_SWIGLU
from tpcompile.passes.pipeline import decode_pipeline, default_pipeline
from tpcompile.rewriting.manager import clone
from tpcompile.vm.groups import AllReduce, LinearResidual, NormQkvRows
from tpcompile.vm.groups.qkv_operands import Part
from tpcompile.vm.lowering import Lowered, StepPlan, lower
from tpcompile.vm.program import Role
from tpcompile.vm.program.instruction import NONE


def _lowered(case: Case) -> Lowered:
    return lower(case.graph, case.plan)


def _kinds(found: Lowered) -> Counter[str]:
    return Counter(one.name for one in found.instructions)


def test_the_instructions_of_a_layer() -> None:
    """Counts follow from the sizes: 6 query and 2 KV heads, 3 workers, 5 sequences, 2 spans."""
    found = _lowered(Case("tiny-qwen3", lowering="heads"))
    layer = [one for one in found.instructions if one.layer == 1]
    assert Counter(one.name for one in layer) == {
        "norm_qkv_rope_append": 4,  # 6 + 2 + 2 heads, at most 4 each
        "partial_attention": 5 * 2,  # of 2 spans each
        "attention_reduce": 5,
        "linear_residual": 2 * 3,
        "norm_gate_up_swiglu": 3,
    }
    assert _kinds(found)["embed"] == 1 and _kinds(found)["argmax"] == 1
    assert [one.layer for one in found.instructions if one.name == "norm_lm_head"] == [NONE] * 3


def test_sums_across_ranks() -> None:
    """Each rank has one sum for the embedding and two per layer, which add to the residual."""
    found = _lowered(Case("tiny-qwen3", 3, lowering="heads"))
    sums = [one for one in found.instructions if isinstance(one, AllReduce)]
    sites = Counter((one.rank, one.at.site.name, one.layer) for one in sums)
    assert set(sites.values()) == {1}
    assert len(sites) == 3 * (1 + 2 * 2)
    assert all((one.at.residual == NONE) == (one.at.site.name == "EMBEDDING") for one in sums)
    assert all(one.at.ranks == 3 for one in sums)
    assert _kinds(found)["linear_residual"] == 0


@pytest.mark.parametrize("tp", [1, 2])
def test_the_residual_is_double_buffered(tp: int) -> None:
    """The residual alternates between two buffers, and each reader uses the last one written."""
    found = _lowered(Case("tiny-qwen3", tp))
    last = "x0"
    for one in found.instructions:
        if not isinstance(one, LinearResidual | AllReduce) or one.at.residual == NONE:
            continue
        names = [found.buffers[n].name for n in (one.at.residual, one.at.out)]
        assert sorted(names) == ["x0", "x1"]
        last = names[1]
    head = next(one for one in found.instructions if one.name == "norm_lm_head")
    assert found.buffers[head.at.normed.x].name == last


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_blocks_of_heads(model: str) -> None:
    """All heads have several blocks, and each head has its own arrival counter."""
    found = _lowered(Case(model, 3, lowering="rows", workers=16))
    places: dict[tuple[int, int, int], set[tuple[Part, int]]] = {}
    for one in found.instructions:
        if isinstance(one, NormQkvRows):
            box = one.joins[0].region.box[0][0]
            places.setdefault((one.layer, one.rank, box), set()).add((one.at.part, one.head))
            assert one.blocks > 1
            has_norm = one.at.head_norm != NONE
            assert has_norm == (model == "tiny-qwen3" and one.at.part != Part.V)
            assert (one.at.bias != NONE) == (model == "tiny-qwen2")
    assert all(len(heads) == 1 for heads in places.values())


def test_uneven_heads_read_the_kv_heads_that_they_are_given() -> None:
    """14 query heads and 2 KV heads on 4 ranks: each query head attends once per span."""
    case = Case("qwen2.5-0.5b", 4, lengths=(9,), spans=1)
    found = _lowered(case)
    for rank, wanted in enumerate((4, 4, 3, 3)):
        heads = [
            head
            for one in found.instructions
            if one.name == "partial_attention" and (one.rank, one.layer) == (rank, 0)
            for head in range(one.heads.start, one.heads.stop)  # type: ignore[attr-defined]
        ]
        assert heads == list(range(wanted))


@pytest.mark.parametrize("workers", [1, 7, 23])
def test_every_best_is_written_whatever_the_shares_of_the_vocabulary(workers: int) -> None:
    """Ranks with fewer rows fill all slots too, since argmax reads all of them."""
    found = _lowered(Case("tiny-qwen3", 3, workers=workers))
    heads = [one for one in found.instructions if one.name == "norm_lm_head"]
    (wanted,) = {one.at.slots for one in found.instructions if one.name == "argmax"}
    for rank in range(3):
        slots = [one.slot for one in heads if one.rank == rank]  # type: ignore[attr-defined]
        assert slots == list(range(wanted))


def test_splits_of_columns_are_whole_leaves() -> None:
    with pytest.raises(
        UsageError, match=r"column_splits=8 is too many on 2 ranks\. Expected at most 4"
    ):
        _lowered(Case(EVEN, 2, column_splits=8))
    names = _kinds(_lowered(Case(EVEN, column_splits=8)))
    assert names["linear_terms"] == 2 * 2 * 3 * 8 and names["linear_residual"] == 0


def test_all_regions_lie_in_their_buffers() -> None:
    """Regions are on the instruction's own rank, except that sums and argmax read other ranks."""
    found = _lowered(Case("tiny-qwen3", 3, lowering="rows", workers=16))
    read = set()
    for one in found.instructions:
        for region in (*one.writes, *(join.region for join in one.joins)):
            assert found.buffers[region.buffer].rank == one.rank
        for region in one.reads:
            if found.buffers[region.buffer].rank != one.rank:
                read.add((one.name, found.buffers[region.buffer].name))
    assert read == {
        ("all_reduce", "attention_terms"),
        ("all_reduce", "mlp_terms"),
        ("argmax", "best_logits"),
        ("argmax", "best_ids"),
    }


def _stage(model: str, passes: Any) -> Any:
    return graph_after(preset_pair(model), passes)


@pytest.mark.parametrize("lowering", ["heads", "rows"])
def test_a_cache_in_int8_has_the_same_regions(lowering: str) -> None:
    """A row is one part of memory with its scale, so every proof of the regions applies."""
    case = Case("tiny-qwen3", tp=3, spans=3, lowering=lowering)
    plain, eight = (_lowered(replace(case, kv=kv)) for kv in ("model", "int8"))
    for one, other in zip(plain.instructions, eight.instructions, strict=True):
        assert (one.reads, one.writes, one.joins) == (other.reads, other.writes, other.joins)
        fewer = one.name == "partial_attention"
        assert other.traffic * 4 * 16 == one.traffic * (16 + 4 if fewer else 4 * 16)
    for before, after in zip(plain.buffers, eight.buffers, strict=True):
        if before.role == Role.CACHE:
            assert after == replace(before, dtype=torch.int8, format=ROUNDED)
            assert after.extents == (*before.extents[:-1], 16 + 4)
        else:
            assert after == before


def test_refuses_what_is_no_decode_graph() -> None:
    """A graph that is no decode graph is refused with the node, its location and a hint."""
    gm = _stage("tiny-qwen3", default_pipeline())
    with pytest.raises(UnsupportedError) as refused:
        lower(gm, StepPlan(2))
    said = str(refused.value)
    assert "is not part of any decode instruction" in said
    assert "modeling_qwen3.py" in said and "-p decode" in said


def test_refuses_an_op_that_it_lacks() -> None:
    """An unsupported op within a layer is refused with the op and its location."""
    gm = clone(_stage("tiny-qwen3", decode_pipeline()))
    node = next(n for n in gm.graph.nodes if n.target is NORM_GATE_UP_SWIGLU)
    with gm.graph.inserting_after(node):
        relu = gm.graph.call_function(torch.ops.aten.relu.default, (node,))
        relu.meta = dict(node.meta)
    node.replace_all_uses_with(relu, lambda user: user is not relu)
    with pytest.raises(UnsupportedError, match=r"aten\.relu") as refused:
        lower(gm, StepPlan(2))
    assert "model.layers.0.mlp" in str(refused.value)


def test_refuses_a_step_without_a_token() -> None:
    passes = [one for one in decode_pipeline() if one.name != "greedy-head"]
    with pytest.raises(UnsupportedError, match="the graph chooses no token"):
        lower(_stage("tiny-qwen3", passes), StepPlan(2))


def test_more_layers_are_more_of_the_same() -> None:
    """All layers have the same instructions."""
    found = _lowered(replace(Case("tiny-qwen3", 2), lowering="rows"))
    layers = [
        Counter((one.name, one.rank) for one in found.instructions if one.layer == layer)
        for layer in (0, 1)
    ]
    assert layers[0] == layers[1]


@pytest.mark.parametrize("place", range(12))
def test_a_graph_with_swapped_operands_is_refused_by_its_node(place: int) -> None:
    passes = decode_pipeline(1, 2, 4)
    gm = graph_after(preset_pair("tiny-qwen2"), passes)
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    node = [n for n in nodes if all(isinstance(arg, fx.Node) for arg in n.args[:2])][place]
    node.args = (node.args[1], node.args[0], *node.args[2:])
    plan = StepPlan(2, 1, max_seq_len=32, context=32, grain=4)
    with pytest.raises(VerifyError, match=rf"violates the rule .*%{node.name} .*Found .*Expected"):
        lower(gm, plan)
