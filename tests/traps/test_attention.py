"""Traps 1 to 9: masks, projections, biases, heads and the rotation."""

from __future__ import annotations

import dataclasses
import importlib
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.models import (
    TOLERANCE,
    Pair,
    batch,
    eager_logits,
    pair_of,
    preset_pair,
    relative_error,
    run,
)
from tests.traps.detection import (
    LENGTHS,
    VISIBLE,
    assert_good,
    bypass,
    called,
    error_of,
    lowered,
    made_of,
    rules_broken,
)
from tpcompile.frontend.rotary import RotaryTables
from tpcompile.ir.layout import FusedLayout, Layout, even_runs
from tpcompile.ir.meta import (
    Parameter,
    operand,
    parameter_of,
    parameters,
    set_parameter,
    value_type,
)
from tpcompile.ir.ops import (
    LINEAR,
    PAGED_ATTENTION,
    ROPE,
)
from tpcompile.ir.plan import plan_heads
from tpcompile.ir.recipe import take
from tpcompile.ir.simulate import logits_of
from tpcompile.passes import insert
from tpcompile.presets import preset
from tpcompile.runtime.model import CompiledModel

aten = torch.ops.aten


def test_1_a_mask_of_ones_times_minus_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full causal attention needs no mask, so the trap is tested with a window."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    pair = pair_of(AutoConfig.for_model(**{**preset("tiny-qwen3"), **window}))
    gm = lowered(pair, 2)
    assert_good(gm, pair)

    def additive(new: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
        return torch.ones(new, length).triu(1) * float("-inf")

    module = importlib.import_module("tpcompile.ir.ops.attention")
    monkeypatch.setattr(module, "causal_mask", additive)
    for logits in logits_of(run(gm, pair, batch(LENGTHS, 1013))):
        assert relative_error(logits, eager_logits(pair.eager, LENGTHS)) == float("inf")


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_2_a_projection_split_along_its_input(projection: str) -> None:
    """A split along the wrong dimension is refused, even if shapes fit at tp=2."""
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 2, "insert-collectives")
    assert_good(gm, pair)
    weight = made_of(gm, f"self_attn.{projection}")
    whole = parameter_of(weight)
    layout = Layout("in", 64, 1, even_runs(64, 2))
    unsplit = Parameter.replicated(whole.whole, torch.float32, 2)
    set_parameter(weight, unsplit.sharded(1, layout))
    assert "contraction-layout" in rules_broken(gm)


def test_3_a_fused_projection_split_as_one() -> None:
    """Rank 0 would hold most of q, and rank 1 the rest of q with k and v."""
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 2)
    assert_good(gm, pair)
    weight = made_of(gm, "self_attn.q_proj")
    good = parameter_of(weight)
    rows = int(good.type.shape[0])
    halves = tuple(take(good.whole, 0, a, b) for ((a, b),) in even_runs(rows, 2))
    set_parameter(weight, dataclasses.replace(good, shards=halves))
    assert "recipe" in rules_broken(gm), "the type is right, the rows are wrong"
    assert error_of(gm, pair) > VISIBLE
    unsplit = Parameter.replicated(good.whole, torch.float32, 2)
    set_parameter(weight, unsplit.sharded(0, Layout("qkv", rows, 1, even_runs(rows, 2))))
    assert "split-segments" in rules_broken(gm), "rows and type agree, but not with the split"


@pytest.mark.parametrize("sizes", ["local", "local times tp"])
def test_4_sizes_that_are_a_rank_s(sizes: str) -> None:
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 4)
    assert_good(gm, pair)
    (split, *_) = called(gm, aten.split_with_sizes.default)
    layout = value_type(operand(split)).layout_of(1)
    assert isinstance(layout, FusedLayout)
    local = [segment.extent(0) for segment in layout.segments]
    factor = 1 if sizes == "local" else 4
    split.args = (split.args[0], [factor * size for size in local], 1)
    assert "split-sizes" in rules_broken(gm)


@pytest.mark.parametrize(
    ("name", "projection"),
    [
        ("tiny-qwen2", "q_proj"),
        ("tiny-qwen2", "k_proj"),
        ("tiny-qwen2", "v_proj"),
    ],
)
def test_5_a_bias_dropped(name: str, projection: str) -> None:
    pair = preset_pair(name)
    gm = lowered(pair, 2, "insert-collectives")
    assert_good(gm, pair)
    weight = made_of(gm, f"self_attn.{projection}.weight")
    (linear,) = weight.users
    assert len(linear.args) == 3
    linear.args = linear.args[:2]
    assert error_of(gm, pair) > VISIBLE


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_5_a_per_head_norm_dropped(norm: str) -> None:
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 2)
    assert_good(gm, pair)
    (node,) = made_of(gm, f"self_attn.{norm}").users
    bypass(node)
    assert error_of(gm, pair) > VISIBLE


def test_5_a_fused_bias_dropped() -> None:
    pair = preset_pair("tiny-qwen2")
    gm = lowered(pair, 2)
    assert_good(gm, pair)
    fused = [n for n in called(gm, LINEAR) if len(n.args) == 3]
    assert len(fused) == 2
    fused[0].args = fused[0].args[:2]
    assert error_of(gm, pair) > VISIBLE


@lru_cache
def llama_with_biases() -> Pair:
    """Return a Llama whose output projection has a bias, unlike all Qwen models."""
    return pair_of(
        AutoConfig.for_model(
            "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=101, attention_bias=True,
            mlp_bias=True, bos_token_id=0, eos_token_id=0, max_position_embeddings=64,
        )
    )  # fmt: skip


def test_6_the_bias_of_a_row_parallel_linear_on_every_rank() -> None:
    pair = llama_with_biases()
    gm = lowered(pair, 2, "insert-collectives")
    assert_good(gm, pair)
    bias = made_of(gm, "o_proj.bias")
    (added,) = bias.users
    linear = operand(operand(added))
    assert linear.target is LINEAR
    linear.prepend(bias)
    linear.args = (*linear.args, bias)
    bypass(added)
    assert "bias-once" in rules_broken(gm)
    assert error_of(gm, pair) > VISIBLE, "the bias is added twice"


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3", "qwen2.5-7b"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_7_keys_and_values_are_those_of_kv_heads(name: str, tp: int) -> None:
    """Attention and cache have the KV heads, none of them repeated."""
    pair = preset_pair(name)
    gm = lowered(pair, tp)
    heads = pair.captured.config.num_key_value_heads
    shares = CompiledModel.simulated(pair.captured, gm, [], pair.read).plan.ranks

    def stored() -> set[Any]:
        kinds = [value_type(operand(n, i)) for n in called(gm, PAGED_ATTENTION) for i in (1, 2)]
        cache = next(n for n in gm.graph.nodes if n.op == "placeholder" and n.name == "cache")
        return {kind.shape[1] for kind in kinds} | {value_type(cache).shape[3]}

    assert stored() == {heads}
    assert all(share.kv_heads <= heads for share in shares)
    node = called(gm, PAGED_ATTENTION)[0]
    with gm.graph.inserting_before(node):
        key = operand(node, 1)
        again = insert(node, aten.cat.default, [key, key], 1)
        again.meta["type"] = dataclasses.replace(
            value_type(key), shape=("T", 2 * heads, *value_type(key).shape[2:])
        )
    node.args = (node.args[0], again, again, *node.args[3:])
    assert stored() != {heads}
    assert rules_broken(gm) != set()


@pytest.mark.parametrize("name", ["tiny-qwen3", "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-8b"])
@pytest.mark.parametrize("tp", [2, 3, 4, 5, 6])
def test_8_kv_heads_by_habit(name: str, tp: int) -> None:
    """`rank * kv_heads // tp` (or `rank // (tp // kv_heads)`) is not the first head read."""
    pair = preset_pair(name)
    config = pair.captured.config
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    gm = lowered(pair, tp, "insert-collectives")
    assert rules_broken(gm) == set()
    count = max(1, keys // tp)
    firsts = [min(rank * keys // tp, keys - count) for rank in range(tp)]
    by_habit = tuple(((first, first + count),) for first in firsts)
    right = plan_heads(queries, keys, tp).keys
    misses = any(
        not set(right.units_of(rank)) <= set(range(*by_habit[rank][0])) for rank in range(tp)
    )
    covered = {unit for ((a, b),) in by_habit for unit in range(a, b)} == set(range(keys))
    for projection in ("k_proj", "v_proj"):
        for node in parameters(gm.graph):
            if projection in parameter_of(node).describe():
                old = value_type(node).layout_of(0)
                assert isinstance(old, Layout)
                habit = dataclasses.replace(old, parts=by_habit)
                whole = parameter_of(node).whole
                set_parameter(
                    node, Parameter.replicated(whole, torch.float32, tp).sharded(0, habit)
                )
    expected = set()
    if not covered:
        expected = {"layout"}
    elif misses:
        expected = {"kv-heads"}
    assert rules_broken(gm) == expected


def test_8_habit_is_wrong_somewhere() -> None:
    """The formula above is wrong for some tp, so that the test can fail."""
    for name, tp in (("tiny-qwen3", 4), ("qwen2.5-0.5b", 3), ("qwen2.5-7b", 3)):
        values = preset(name)
        queries, keys = values["num_attention_heads"], values["num_key_value_heads"]
        held = [plan_heads(queries, keys, tp).keys.units_of(rank) for rank in range(tp)]
        assert any(len(heads) > max(1, keys // tp) for heads in held)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "rope_theta": 1_000_000.0,
    },
}  # fmt: skip


@lru_cache
def rope_pair(kind: str) -> Pair:
    values = {**preset("tiny-qwen3"), "num_hidden_layers": 1, "rope_parameters": ROPES[kind]}
    return pair_of(AutoConfig.for_model(**values))


MISTAKES = [
    (kind, mistake)
    for kind in ROPES
    for mistake in ("theta of 10,000", "left out", "plain instead")
    if (kind, mistake) != ("default", "plain instead")
]


@pytest.mark.parametrize(("kind", "mistake"), MISTAKES)
def test_9_rotary_embedding_of_another_kind(kind: str, mistake: str) -> None:
    pair = rope_pair(kind)
    gm = lowered(pair, 2)
    long = (40, 3)
    assert error_of(gm, pair, long) < TOLERANCE
    config = pair.captured.config
    wrong = type(config)(**config.to_dict())
    if mistake == "left out":
        for node in called(gm, ROPE):
            bypass(node)
    elif mistake == "theta of 10,000":
        wrong.rope_parameters = {**ROPES[kind], "rope_theta": 10_000.0}
    else:
        wrong.rope_parameters = ROPES["default"]
    with torch.device("meta"):
        source = type(pair.captured.rotary._source[0])(config=wrong)
    rotary = pair.captured.rotary if mistake == "left out" else RotaryTables(source, wrong)
    mistaken = Pair(dataclasses.replace(pair.captured, rotary=rotary), pair.eager, pair.read)
    assert error_of(gm, mistaken, long) > VISIBLE


def test_9_tables_computed_in_bf16() -> None:
    """Tables are computed in fp32 and then cast, as in Hugging Face."""
    pair = preset_pair("tiny-qwen3")
    eager = pair.eager.model.rotary_emb
    positions = torch.arange(300)
    like = torch.empty(0, dtype=torch.bfloat16)
    expected = eager(like, positions[None])
    tables = pair.captured.rotary.fresh()(positions, 16, torch.bfloat16)
    for ours, theirs in zip(tables, expected, strict=True):
        assert torch.equal(ours, theirs[0])
    narrow = positions[:, None].bfloat16() * eager.inv_freq.bfloat16()
    early = torch.cat([narrow, narrow], -1).cos()
    assert not torch.equal(early, expected[0][0])


def test_9_a_failure_is_not_swallowed() -> None:
    rotary = preset_pair("tiny-qwen3").captured.rotary.fresh()
    with pytest.raises(ValueError, match="must have width 32, got 16"):
        rotary(torch.arange(3), 32, torch.float32)
