"""Tests of the decode pipeline as a whole: its stages, their values, and supported backends."""

from __future__ import annotations

import pytest
import torch

import tpcompile
from tests.models import TOLERANCE, Pair, batch, preset_pair, relative_error, run, whole
from tests.passes.decoding import BATCHES, BLOCK, DECODE, Filled, decode_stages, filled, run_step
from tests.passes.steps import STANDARD, TINY_VOCABULARY
from tpcompile.backends.torch_tp import emit_sources
from tpcompile.errors import CompileError, UnsupportedError
from tpcompile.ir.meta import captured_value, type_of
from tpcompile.ir.ops import op_name
from tpcompile.ir.text import format_graph
from tpcompile.ir.types import ValueType
from tpcompile.passes import Stage, for_ranks, parse_pipeline, pipeline_text, run_passes
from tpcompile.passes.cache_kv import CacheKv
from tpcompile.passes.pipeline import DecodeFork, decode_pipeline, decoding
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.passes.split_attention import SplitAttention

MODELS = ["tiny-qwen2", "tiny-qwen3"]


def test_it_is_the_standard_pipeline_and_more() -> None:
    names = [current.name for current in decode_pipeline(3)]
    common = [name for name in STANDARD[1:] if name not in ("fuse-add-norm", "select-rows")]
    assert names == [*common, *DECODE]


def test_its_options_are_those_of_its_passes() -> None:
    passes = decode_pipeline(3, spans=5, block=8)
    assert {PlanSharding(tp=3), SplitAttention(5), CacheKv(8)} < set(passes)
    assert parse_pipeline(pipeline_text(passes)) == passes
    assert CacheKv() in decode_pipeline() and SplitAttention(1) in decode_pipeline()


@pytest.mark.parametrize(
    ("pipeline", "shared"), [("standard", 16), ("standard{block=4,interleaved=true}", 17)]
)
def test_it_resumes_where_it_differs_from_the_prompt_pipeline(pipeline: str, shared: int) -> None:
    """The passes that both pipelines have in common run once, and the graph is the same."""
    passes, names = for_ranks(parse_pipeline(pipeline), 2), list[str]()
    captured = preset_pair("tiny-qwen3").captured.graph
    fork = DecodeFork(passes)
    run_passes(captured, passes, [fork])
    resumed = fork.run(3, [lambda name, gm, stats: names.append(name)])
    wanted, _ = run_passes(captured, decoding(passes, 3))
    assert format_graph(resumed) == format_graph(wanted)
    assert names[1:] == [current.name for current in decoding(passes, 3)[shared:]]


def test_a_resumed_pass_that_fails_names_all_passes_before_it() -> None:
    passes = for_ranks(parse_pipeline("canonicalize,fuse-add-norm,plan-sharding"), 2)
    fork = DecodeFork(passes)
    run_passes(preset_pair("tiny-qwen3").captured.graph, passes[:1], [fork])
    with pytest.raises(
        CompileError, match=r"In the pass plan-sharding\{tp=2\}, after canonicalize"
    ):
        fork.run(1)


GROUPS = {
    "tpc.rotary",
    "getitem",
    "tpc.norm_qkv_rope_append",
    "tpc.partial_attention",
    "tpc.attention_reduce",
    "aten.flatten",
    "tpc.norm_gate_up_swiglu",
    "aten.index_select",
    "tpc.norm_linear",
    "tpc.argmax",
}
ONE_RANK = {"aten.embedding", "tpc.linear_residual"}
SEVERAL = {
    "tpc.vocab_embedding",
    "tpc.all_reduce",
    "aten.linear",
    "tpc.all_reduce_residual",
    "tpc.all_gather",
}


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_left_are_instruction_groups(model: str, tp: int) -> None:
    nodes = decode_stages(model, tp, 3)[-1].graph.graph.nodes
    ops = {op_name(node) for node in nodes if node.op.startswith("call")}
    assert ops == GROUPS | (ONE_RANK if tp == 1 else SEVERAL)


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_every_value_of_a_step_is_that_of_the_captured_node(model: str, tp: int) -> None:
    """Values of a decode step equal the captured values of the last tokens."""
    pair = preset_pair(model)
    lengths = BATCHES[1]
    packed = batch(lengths, TINY_VOCABULARY)
    captured = run(pair.captured.graph, pair, packed)
    expected = {node.name: values[0] for node, values in captured.items()}
    last = torch.tensor(lengths).cumsum(0) - 1
    for stage in decode_stages(model, tp, 3)[-1 - len(DECODE) :]:
        compared = _compare(stage, pair, filled(model, tp, lengths), expected, last)
        layers = pair.captured.config.num_hidden_layers
        assert len(compared) >= 6 * layers + 4, stage.name


def _compare(
    stage: Stage,
    pair: Pair,
    prefill: Filled,
    expected: dict[str, torch.Tensor],
    last: torch.Tensor,
) -> set[str]:
    """Compare all values of a stage that the captured graph has too; return their names."""
    compared = set()
    for node, values in run_step(stage.graph, pair, prefill.inputs, prefill.kept).values.items():
        value = captured_value(node) if node.op.startswith("call") else None
        if value is None or not isinstance(type_of(node), ValueType):
            continue
        actual, target = whole(node, {node: values}), expected[value]
        target = target.squeeze(0) if target.dim() > actual.dim() else target
        target = target.index_select(0, last)
        assert actual.shape == target.shape, (stage.name, node.name, value)
        assert relative_error(actual, target) < TOLERANCE, (stage.name, node.name, value)
        compared.add(value)
    return compared


def test_a_first_step_needs_no_cache_of_its_own() -> None:
    """Simulated ranks allocate an empty cache, as they do for the stages before."""
    pair = preset_pair("tiny-qwen3")
    packed = batch((1, 1, 1), TINY_VOCABULARY)
    first, *later = (
        stage.run(pair.read, **packed.inputs())
        for stage in decode_stages("tiny-qwen3", 3, 2)[-1 - len(DECODE) :]
    )
    assert len(later) == len(DECODE)
    for ranks in later:
        assert all(relative_error(logits, first[0]) < 1e-6 for logits in ranks)


def test_prompts_are_refused() -> None:
    pair = preset_pair("tiny-qwen3")
    for stage in decode_stages("tiny-qwen3", 2, 2)[-len(DECODE) :]:
        with pytest.raises(ValueError, match="one new token of each sequence"):
            stage.run(pair.read, **batch((3, 1), TINY_VOCABULARY).inputs())


@pytest.mark.parametrize("tp", [1, 2])
def test_the_torch_backend_refuses_these_graphs(tp: int) -> None:
    for stage in decode_stages("tiny-qwen3", tp, 2)[-len(DECODE) :]:
        with pytest.raises(UnsupportedError, match="cannot be emitted as torch code"):
            emit_sources(stage.graph)


@pytest.mark.parametrize("tp", [1, 2])
def test_it_compiles_to_no_torch_module(tp: int) -> None:
    """A decode graph has no prefill, so it cannot be compiled to a torch module."""
    with pytest.raises(UnsupportedError) as refused:
        tpcompile.compile(
            "preset:tiny-qwen3", tp, pipeline="decode", random_weights=0, simulate=True
        )
    assert "Only programs support the ops of a decode step: end the pipeline with cache-kv" in str(
        refused.value
    )


def test_blocks_are_those_asked_for() -> None:
    text = decode_stages("tiny-qwen3", 1, 3)[-1].text()
    assert f"block={BLOCK}, spans=3" in text
