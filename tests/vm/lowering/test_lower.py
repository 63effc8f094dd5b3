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


def _kinds(lowered: Lowered) -> Counter[str]:
    return Counter(instruction.name for instruction in lowered.instructions)


def test_the_instructions_of_a_layer() -> None:
    """Counts follow from the sizes: 6 query and 2 KV heads, 3 workers, 5 sequences, 2 spans."""
    lowered = _lowered(Case("tiny-qwen3", lowering="heads"))
    layer = [instruction for instruction in lowered.instructions if instruction.layer == 1]
    assert Counter(instruction.name for instruction in layer) == {
        "norm_qkv_rope_append": 4,  # 6 + 2 + 2 heads, at most 4 each
        "partial_attention": 5 * 2,  # of 2 spans each
        "attention_reduce": 5,
        "linear_residual": 2 * 3,
        "norm_gate_up_swiglu": 3,
    }
    assert _kinds(lowered)["embed"] == 1 and _kinds(lowered)["argmax"] == 1
    assert [
        instruction.layer
        for instruction in lowered.instructions
        if instruction.name == "norm_lm_head"
    ] == [NONE] * 3


def test_sums_across_ranks() -> None:
    """Each rank has one sum for the embedding and two per layer, which add to the residual."""
    lowered = _lowered(Case("tiny-qwen3", 3, lowering="heads"))
    sums = [
        instruction for instruction in lowered.instructions if isinstance(instruction, AllReduce)
    ]
    sites = Counter(
        (instruction.rank, instruction.at.site.name, instruction.layer) for instruction in sums
    )
    assert set(sites.values()) == {1}
    assert len(sites) == 3 * (1 + 2 * 2)
    assert all(
        (instruction.at.residual == NONE) == (instruction.at.site.name == "EMBEDDING")
        for instruction in sums
    )
    assert all(instruction.at.ranks == 3 for instruction in sums)
    assert _kinds(lowered)["linear_residual"] == 0


@pytest.mark.parametrize("tp", [1, 2])
def test_the_residual_is_double_buffered(tp: int) -> None:
    """The residual alternates between two buffers, and each reader uses the last one written."""
    lowered = _lowered(Case("tiny-qwen3", tp))
    last = "x0"
    for instruction in lowered.instructions:
        if (
            not isinstance(instruction, LinearResidual | AllReduce)
            or instruction.at.residual == NONE
        ):
            continue
        names = [lowered.buffers[n].name for n in (instruction.at.residual, instruction.at.out)]
        assert sorted(names) == ["x0", "x1"]
        last = names[1]
    head = next(
        instruction for instruction in lowered.instructions if instruction.name == "norm_lm_head"
    )
    assert lowered.buffers[head.at.normed.x].name == last


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_blocks_of_heads(model: str) -> None:
    """All heads have several blocks, and each head has its own arrival counter."""
    lowered = _lowered(Case(model, 3, lowering="rows", workers=16))
    places: dict[tuple[int, int, int], set[tuple[Part, int]]] = {}
    for instruction in lowered.instructions:
        if isinstance(instruction, NormQkvRows):
            box = instruction.joins[0].region.box[0][0]
            places.setdefault((instruction.layer, instruction.rank, box), set()).add(
                (instruction.at.part, instruction.head)
            )
            assert instruction.blocks > 1
            has_norm = instruction.at.head_norm != NONE
            assert has_norm == (model == "tiny-qwen3" and instruction.at.part != Part.V)
            assert (instruction.at.bias != NONE) == (model == "tiny-qwen2")
    assert all(len(heads) == 1 for heads in places.values())


def test_uneven_heads_read_the_kv_heads_that_they_are_given() -> None:
    """14 query heads and 2 KV heads on 4 ranks: each query head attends once per span."""
    case = Case("qwen2.5-0.5b", 4, lengths=(9,), spans=1)
    lowered = _lowered(case)
    for rank, wanted in enumerate((4, 4, 3, 3)):
        heads = [
            head
            for instruction in lowered.instructions
            if instruction.name == "partial_attention"
            and (instruction.rank, instruction.layer) == (rank, 0)
            for head in range(instruction.heads.start, instruction.heads.stop)  # type: ignore[attr-defined]
        ]
        assert heads == list(range(wanted))


@pytest.mark.parametrize("workers", [1, 7, 23])
def test_every_best_is_written_whatever_the_shares_of_the_vocabulary(workers: int) -> None:
    """Ranks with fewer rows fill all slots too, since argmax reads all of them."""
    lowered = _lowered(Case("tiny-qwen3", 3, workers=workers))
    heads = [
        instruction for instruction in lowered.instructions if instruction.name == "norm_lm_head"
    ]
    (wanted,) = {
        instruction.at.slots for instruction in lowered.instructions if instruction.name == "argmax"
    }
    for rank in range(3):
        slots = [head.slot for head in heads if head.rank == rank]  # type: ignore[attr-defined]
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
    lowered = _lowered(Case("tiny-qwen3", 3, lowering="rows", workers=16))
    read = set()
    for instruction in lowered.instructions:
        for region in (*instruction.writes, *(join.region for join in instruction.joins)):
            assert lowered.buffers[region.buffer].rank == instruction.rank
        for region in instruction.reads:
            if lowered.buffers[region.buffer].rank != instruction.rank:
                read.add((instruction.name, lowered.buffers[region.buffer].name))
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
    for instruction, other in zip(plain.instructions, eight.instructions, strict=True):
        assert (instruction.reads, instruction.writes, instruction.joins) == (
            other.reads,
            other.writes,
            other.joins,
        )
        fewer = instruction.name == "partial_attention"
        assert other.traffic * 4 * 16 == instruction.traffic * (16 + 4 if fewer else 4 * 16)
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
    message = str(refused.value)
    assert "is not part of any decode instruction" in message
    assert "modeling_qwen3.py" in message and "-p decode" in message


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
    passes = [current for current in decode_pipeline() if current.name != "greedy-head"]
    with pytest.raises(UnsupportedError, match="the graph chooses no token"):
        lower(_stage("tiny-qwen3", passes), StepPlan(2))


def test_more_layers_are_more_of_the_same() -> None:
    """All layers have the same instructions."""
    lowered = _lowered(replace(Case("tiny-qwen3", 2), lowering="rows"))
    layers = [
        Counter(
            (instruction.name, instruction.rank)
            for instruction in lowered.instructions
            if instruction.layer == layer
        )
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
