"""Simulated ranks hold their own parts, and together give the values of the whole."""

from __future__ import annotations

import pytest
import torch

from tests.models import TOLERANCE, batch, preset_pair, relative_error, run, stage_logits, whole
from tests.stages import graph_after
from tpcompile.ir.checker import verify_graph
from tpcompile.ir.info import info_of
from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.meta import parameter_of, type_of
from tpcompile.ir.ops import ALL_REDUCE, PAGED_ATTENTION, REDUCE_SCATTER, SPECS
from tpcompile.ir.simulate import local_args, materialise, rank_inputs
from tpcompile.ir.types import Partial, Replicate, Shard, ValueType
from tpcompile.passes import default_pipeline
from tpcompile.passes.sequence_parallel import SequenceParallel
from tpcompile.rewriting.rewrite import calls

PACKED = batch((5, 1, 7), 1013)


@pytest.mark.parametrize("tp", [1, 2, 4, 5])
def test_weights_are_each_rank_s_part(tp: int) -> None:
    pair = preset_pair("tiny-qwen3")
    gm = graph_after(pair, default_pipeline(tp))
    weights = materialise(gm, pair.read)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            kind = parameter_of(node).type
            shapes = [tuple(value.shape) for value in weights[str(node.target)]]
            assert shapes == [kind.local_shape(rank) for rank in range(tp)]


@pytest.mark.parametrize("tp", [1, 2, 4, 6])
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3"])
def test_every_value_is_as_its_type_says(name: str, tp: int) -> None:
    """Replicas are bitwise equal, parts have the declared shape, and wholes equal tp=1."""
    pair = preset_pair(name)
    gm = graph_after(pair, [*default_pipeline(tp), SequenceParallel()])
    single = graph_after(pair, default_pipeline(1))
    values, expected = run(gm, pair, PACKED), run(single, pair, PACKED)
    placements: set[type] = set()
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        assert len(values[node]) == tp
        kinds = type_of(node)
        if not isinstance(kinds, ValueType):
            continue
        placements.add(type(kinds.placement))
        for rank, value in enumerate(values[node]):
            local = kinds.local_shape(rank)
            for dim, extent in zip(local, value.shape, strict=True):
                assert dim == extent or isinstance(dim, str)
            assert value.dtype == kinds.dtype
            if isinstance(kinds.placement, Replicate):
                assert torch.equal(value.nan_to_num(), values[node][0].nan_to_num())
    assert placements == ({Replicate} if tp == 1 else {Replicate, Shard, Partial})
    for stage_node in gm.graph.nodes:
        if stage_node.target is PAGED_ATTENTION:
            twin = next(n for n in single.graph.nodes if n.name == stage_node.name)
            assert relative_error(whole(stage_node, values), whole(twin, expected)) < TOLERANCE


def test_global_arguments_become_each_rank_s() -> None:
    pair = preset_pair("tiny-qwen3")
    gm = graph_after(pair, default_pipeline(4))
    split = next(n for n in gm.graph.nodes if n.name.endswith("_parts"))
    spec = SPECS[split.target]
    assert split.args[1] == [96, 32, 32]
    assert [local_args(split, spec, rank)["split_sizes"] for rank in range(4)] == [
        [32, 16, 16],
        [32, 32, 32],
        [16, 16, 16],
        [16, 16, 16],
    ]
    attention = next(n for n in gm.graph.nodes if n.target is PAGED_ATTENTION)
    arguments = [local_args(attention, SPECS[PAGED_ATTENTION], rank) for rank in range(4)]
    assert arguments == [{}] * 4, "no map is needed with one KV head, or one per query head"
    three = graph_after(preset_pair("qwen2.5-7b"), default_pipeline(3))
    attention = next(n for n in three.graph.nodes if n.target is PAGED_ATTENTION)
    maps = [local_args(attention, SPECS[PAGED_ATTENTION], rank) for rank in range(3)]
    assert maps[0] == {"kv_heads": [0] * 7 + [1] * 3}
    plain = next(n for n in gm.graph.nodes if "normed" in n.name)
    assert local_args(plain, SPECS[plain.target], 0) == {}


def test_ranks_get_empty_caches_and_blocks_in_a_row() -> None:
    """Sequences start in their own blocks, blocks are consecutive, and unwritten slots are NaN."""
    pair = preset_pair("tiny-qwen3")
    gm = graph_after(pair, default_pipeline(4))
    packed = batch((33, 1, 64), 1013)
    dealt = rank_inputs(gm, packed.inputs())
    assert [inputs["cache"].shape for inputs in dealt] == [
        (2, 2, (2 + 1 + 2) * 32, heads, 16) for heads in (1, 2, 1, 1)
    ]
    for inputs in dealt:
        assert bool(inputs["cache"].isnan().all())
        assert inputs["tables"].tolist() == [[0, 1], [2, -1], [3, 4]]
        assert inputs["lengths"].tolist() == [33, 1, 64]
        assert inputs["slots"].tolist() == [*range(33), 64, *range(96, 160)]
        assert all(inputs[name] is value for name, value in packed.inputs().items())
    assert len({inputs["cache"].data_ptr() for inputs in dealt}) == 4


def test_a_graph_without_a_cache_is_given_none() -> None:
    inputs = PACKED.inputs()
    assert rank_inputs(preset_pair("tiny-qwen3").captured.graph, inputs) == [inputs]


def test_tokens_lie_on_ranks_in_runs() -> None:
    pair = preset_pair("tiny-qwen3")
    gm = graph_after(pair, [*default_pipeline(4), SequenceParallel()])
    values = run(gm, pair, PACKED)
    scattered = next(n for n in gm.graph.nodes if n.target is REDUCE_SCATTER)
    layout = TokenLayout(info_of(gm).tp)
    bounds = [layout.run(rank, 13) for rank in range(4)]
    assert [len(value) for value in values[scattered]] == [b - a for a, b in bounds]


def test_operands_of_collectives_by_keyword() -> None:
    pair = preset_pair("tiny-qwen3")
    gm = graph_after(pair, default_pipeline(2))
    expected = stage_logits(gm, pair, PACKED)
    for node in calls(gm, ALL_REDUCE):
        node.kwargs, node.args = {"x": node.args[0]}, ()
    verify_graph(gm)
    assert torch.equal(stage_logits(gm, pair, PACKED), expected)
