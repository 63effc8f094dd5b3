"""Trap 10: interleaved pairs, with all parameters permuted to match, equal Hugging Face."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

import tpcompile
from tests.models import (
    TOLERANCE,
    batch,
    eager_logits,
    padded,
    preset_pair,
    relative_error,
    run,
    stage_logits,
    whole,
)
from tests.passes.decoding import BATCHES, decode_stages, filled, run_step
from tests.passes.steps import TINY_VOCABULARY, Step, step
from tests.stages import graph_after, stages_of
from tpcompile.errors import PassError
from tpcompile.ir.meta import captured_value, parameter_of, parameters
from tpcompile.ir.ops import NORM_QKV_ROPE_APPEND, ROPE, arguments_of
from tpcompile.ir.ops.rotary import interleave
from tpcompile.ir.recipe import Permute
from tpcompile.passes import Stage, default_pipeline, for_ranks, parse_pipeline, run_passes
from tpcompile.passes.cache_kv import CACHE
from tpcompile.rewriting.rewrite import calls

MODELS = ["tiny-qwen2", "tiny-qwen3"]
STANDARD = "standard{interleaved=true}"
LENGTHS = (3, 1, 4)


def interleaved(model: str, tp: int = 1) -> Step:
    return step("interleave-rotary", model, tp, STANDARD)


@pytest.mark.parametrize("model", MODELS)
def test_golden(model: str, golden: Callable[[str, str], None]) -> None:
    golden(f"passes/interleave_rotary_{model}.txt", interleaved(model, 4).diff())


@pytest.mark.parametrize("model", MODELS)
def test_matches_queries_and_keys_of_every_layer(model: str) -> None:
    current = interleaved(model)
    assert current.matches == 2 * 2
    nodes = calls(current.after.graph, ROPE)
    assert [node.args[3] for node in nodes] == [True] * 4


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_numbers_of_every_stage_behind_it(model: str, tp: int) -> None:
    pair = preset_pair(model)
    expected = eager_logits(pair.eager, LENGTHS)
    packed = batch(LENGTHS, TINY_VOCABULARY)
    stages = stages_of(pair, default_pipeline(tp, interleaved=True))
    names = [stage.name for stage in stages]
    for stage in stages[names.index("interleave-rotary") :]:
        logits = stage_logits(stage.graph, pair, packed)
        assert relative_error(logits, expected) < TOLERANCE, stage.name


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_numbers_of_a_decode_step(model: str, tp: int) -> None:
    """Decode steps after an interleaved prefill agree, across blocks and spans."""
    pair = preset_pair(model)
    for lengths in BATCHES:
        prefill = filled(model, tp, lengths, interleaved=True)
        for stage in decode_stages(model, tp, 3, interleaved=True)[-6:]:
            ran = run_step(stage.graph, pair, prefill.inputs, prefill.kept)
            assert relative_error(ran.logits, prefill.expected) < TOLERANCE, stage.name


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_the_cache_holds_interleaved_keys_and_plain_values(model: str, tp: int) -> None:
    halves, pairs = (filled(model, tp, BATCHES[1], paired) for paired in (False, True))
    for half_split, paired in zip(halves.kept[CACHE], pairs.kept[CACHE], strict=True):
        keys, values = half_split.nan_to_num().unbind(1)
        paired_keys, paired_values = paired.nan_to_num().unbind(1)
        torch.testing.assert_close(paired_keys, interleave(keys), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(paired_values, values, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(paired_keys, keys, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("model", MODELS)
def test_fusions_keep_the_layout(model: str) -> None:
    for paired in (False, True):
        gm = decode_stages(model, 3, 3, paired)[-1].graph
        arguments = [arguments_of(node) for node in calls(gm, NORM_QKV_ROPE_APPEND)]
        assert [bound["interleaved"] for bound in arguments] == [paired] * 2


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_numbers_of_the_pass_alone(model: str, tp: int) -> None:
    interleaved(model, tp).assert_near()


def test_again() -> None:
    assert interleaved("tiny-qwen3").again().matches == 0


@pytest.mark.parametrize("model", MODELS)
def test_what_has_another_order_is_no_captured_value(model: str) -> None:
    """Permuted values have no captured counterpart; all other values match theirs."""
    pair, packed = preset_pair(model), batch(LENGTHS, TINY_VOCABULARY)
    values = run(pair.captured.graph, pair, packed)
    expected = {node.name: of_ranks[0] for node, of_ranks in values.items()}
    stages = stages_of(pair, default_pipeline(3, interleaved=True))
    for stage in stages[6:]:
        compared = _compare(stage, run(stage.graph, pair, packed), expected)
        assert len(compared) >= 7 * 2 + 4, stage.name


def _compare(
    stage: Stage, values: dict[fx.Node, list[torch.Tensor]], expected: dict[str, torch.Tensor]
) -> set[str]:
    compared = set()
    for node, of_ranks in values.items():
        name = captured_value(node) if node.op.startswith("call") else None
        if name is not None and isinstance(of_ranks[0], torch.Tensor):
            actual, target = whole(node, values), expected[name]
            target = target.squeeze(0) if target.dim() > actual.dim() else target
            assert relative_error(actual.float(), target.float()) < TOLERANCE, (stage.name, name)
            compared.add(name)
    return compared


@pytest.mark.parametrize("model", MODELS)
def test_each_parameter_is_permuted_once(model: str) -> None:
    """Rows of queries and keys, and their biases or norms, are permuted once; no others are."""
    gm = interleaved(model).after.graph
    recipes = [parameter_of(node).whole for node in parameters(gm.graph)]
    permuted = [recipe.source for recipe in recipes if isinstance(recipe, Permute)]
    names = sorted(
        str(getattr(recipe, "name", recipe)).rpartition("attn.")[2] for recipe in permuted
    )
    kind = "bias" if model == "tiny-qwen2" else "norm"
    vectors = (
        ["k_proj.bias", "q_proj.bias"] if kind == "bias" else ["k_norm.weight", "q_norm.weight"]
    )
    assert names == sorted(2 * ["k_proj.weight", "q_proj.weight", *vectors])


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_the_torch_module_runs_it_and_gives_checkpoint_tensors_back(model: str, tp: int) -> None:
    """Left-padded prompts and cached decode steps agree with eager."""
    pair = preset_pair(model)
    ids, mask = padded((5, 9), TINY_VOCABULARY)
    with tpcompile.compile(
        pair.eager, tp=tp, dtype=torch.float32, pipeline=STANDARD, simulate=True
    ) as compiled:
        assert compiled.source(0).count(", cos, sin, True)  # ") == 4
        new = {"max_new_tokens": 6, "do_sample": False}
        generated = compiled.generate(ids, attention_mask=mask, **new)
        assert torch.equal(generated, pair.eager.generate(ids, attention_mask=mask, **new))
        logits = compiled(ids, attention_mask=mask).logits[mask.bool()]
        assert relative_error(logits, eager_logits(pair.eager, (5, 9))) < TOLERANCE
        for name in (*pair.captured.tensors, *pair.captured.aliases):
            expected = pair.eager.get_parameter(name)
            assert torch.equal(compiled.gather_weight(name), expected), name


# Position in the pipeline.

_RAISED = "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention"


@pytest.mark.parametrize(
    "text",
    [
        f"{_RAISED},plan-sharding,interleave-rotary,shard-linears,kv-heads,insert-collectives",
        f"{_RAISED},plan-sharding,shard-linears,interleave-rotary,insert-collectives,fuse-qkv",
        f"{_RAISED},plan-sharding,shard-linears,kv-heads,interleave-rotary,insert-collectives",
        f"{_RAISED},plan-sharding,shard-linears,kv-heads,cache-kv,interleave-rotary,"
        "insert-collectives",
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_it_may_stand_behind_sharding(model: str, text: str) -> None:
    pair = preset_pair(model)
    gm = graph_after(pair, for_ranks(parse_pipeline(text), 4))
    logits = stage_logits(gm, pair, batch(LENGTHS, TINY_VOCABULARY))
    assert relative_error(logits, eager_logits(pair.eager, LENGTHS)) < TOLERANCE


def test_behind_fuse_qkv_it_is_refused() -> None:
    passes = for_ranks(parse_pipeline(f"{_RAISED},plan-sharding,fuse-qkv"), 1)
    joined, _ = run_passes(preset_pair("tiny-qwen3").captured.graph, passes)
    with pytest.raises(tpcompile.CompileError) as refused:
        run_passes(joined, parse_pipeline("interleave-rotary"))
    assert "Put interleave-rotary before fuse-qkv" in str(refused.value)


def test_heads_that_are_rotated_in_part_are_left_alone() -> None:
    pair = preset_pair("tiny-qwen3.5")
    with pytest.raises(PassError, match="only 4 of the 16 elements of a head are rotated"):
        run_passes(pair.captured.graph, default_pipeline(1, interleaved=True))
