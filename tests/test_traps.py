"""The mistakes of TRAPS.md, put back one by one; the numbers of the tests are its numbers.

Each test first shows that the correct graph passes. It then puts the mistake back and shows that
the checker refuses it, or that the numbers differ from Hugging Face's. Traps of schedules and of
running processes are tested with the program and the runtime.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import fx
from transformers import AutoConfig, AutoModelForCausalLM

from tests.captures import captured_once
from tests.models import (
    TOLERANCE,
    Pair,
    batch,
    eager_logits,
    padded,
    pair_of,
    preset_pair,
    relative_error,
    run,
    stage_logits,
)
from tests.stages import graph_after
from tpcompile.frontend.rotary import RotaryTables
from tpcompile.ir.checker import check_graph
from tpcompile.ir.layout import FusedLayout, Layout, even_runs
from tpcompile.ir.meta import (
    Parameter,
    new_parameter,
    operand,
    origin_of,
    parameter_of,
    parameters,
    set_parameter,
    value_type,
)
from tpcompile.ir.ops import (
    EMBEDDING,
    LINEAR,
    PAGED_ATTENTION,
    RMS_NORM,
    ROPE,
    SPECS,
    VOCAB_EMBEDDING,
)
from tpcompile.ir.plan import plan_axis, plan_heads
from tpcompile.ir.recipe import take
from tpcompile.ir.simulate import logits_of, materialise, run_ranks
from tpcompile.passes import default_pipeline, insert, run_passes
from tpcompile.presets import DENSE, preset
from tpcompile.runtime.kv.packing import Packed, pack
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.weights import RandomWeights

aten = torch.ops.aten
LENGTHS = (5, 1, 9)
VISIBLE = 10 * TOLERANCE
"""A mistake must change the logits at least ten times as much as rounding may.

The smallest effect is that of a bias of keys: softmax cancels any term common to all keys, and
only the rotation makes the bias differ between keys.
"""


# Detection.


def lowered(pair: Pair, tp: int, until: str = "") -> fx.GraphModule:
    """Return the graph after the standard passes, or after a prefix of them."""
    passes = default_pipeline(tp)
    names = [current.name for current in passes]
    last = names.index(until) + 1 if until else len(names)
    return graph_after(pair, passes[:last])


def error_of(gm: fx.GraphModule, pair: Pair, lengths: tuple[int, ...] = LENGTHS) -> float:
    """Return the relative error of the logits."""
    packed = batch(lengths, pair.captured.config.vocab_size)
    return relative_error(stage_logits(gm, pair, packed), eager_logits(pair.eager, lengths))


def rules_broken(gm: fx.GraphModule) -> set[str]:
    return {problem.rule for problem in check_graph(gm)}


def assert_good(gm: fx.GraphModule, pair: Pair) -> None:
    assert rules_broken(gm) == set()
    assert error_of(gm, pair) < TOLERANCE


def called(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def made_of(gm: fx.GraphModule, tensor: str) -> fx.Node:
    return next(node for node in parameters(gm.graph) if tensor in parameter_of(node).describe())


def bypass(node: fx.Node) -> None:
    """Replace a node by its first operand."""
    node.replace_all_uses_with(operand(node))
    node.graph.erase_node(node)


# Numbers.


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
    for found in logits_of(run(gm, pair, batch(LENGTHS, 1013))):
        assert relative_error(found, eager_logits(pair.eager, LENGTHS)) == float("inf")


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
    misses = any(not set(right.held(rank)) <= set(range(*by_habit[rank][0])) for rank in range(tp))
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
        held = [plan_heads(queries, keys, tp).keys.held(rank) for rank in range(tp)]
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
    found = pair.captured.rotary.fresh()(positions, 16, torch.bfloat16)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs[0])
    narrow = positions[:, None].bfloat16() * eager.inv_freq.bfloat16()
    early = torch.cat([narrow, narrow], -1).cos()
    assert not torch.equal(early, expected[0][0])


def test_9_a_failure_is_not_swallowed() -> None:
    rotary = preset_pair("tiny-qwen3").captured.rotary.fresh()
    with pytest.raises(ValueError, match="must have width 32, got 16"):
        rotary(torch.arange(3), 32, torch.float32)


def test_15_a_tied_tensor_as_two_parameters() -> None:
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 2)
    assert_good(gm, pair)
    table = made_of(gm, "embed_tokens")
    assert {user.target for user in table.users} == {VOCAB_EMBEDDING, LINEAR}
    model = CompiledModel.simulated(pair.captured, gm, [], pair.read)
    tied = pair.eager.get_input_embeddings().weight
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(model.gather_weight(name), tied)
    (head,) = (user for user in table.users if user.target is LINEAR)
    with gm.graph.inserting_before(head):
        twin = new_parameter(gm.graph, "twin", parameter_of(table), origin_of(table), gm)
    head.args = (head.args[0], twin)
    assert rules_broken(gm) == {"one-owner"}


def test_15_a_checkpoint_without_the_head() -> None:
    """With a tied head only the table is read; otherwise both weights are, and they differ."""
    names: list[str] = []

    def reads(pair: Pair) -> set[str]:
        names.clear()

        def read(name: str, index: tuple[slice, ...]) -> torch.Tensor:
            names.append(name)
            return pair.read(name, index)

        materialise(lowered(pair, 2), read)
        return set(names)

    assert "lm_head.weight" not in reads(preset_pair("tiny-qwen3"))
    untied = preset_pair("qwen3-8b")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= reads(untied)


VOCAB = Layout("vocab", 1013, 1, even_runs(1013, 4))


def test_16_ids_of_other_ranks() -> None:
    """With 1013 rows on 4 ranks, ids outside of a rank's rows contribute exactly zero."""
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 4)
    assert_good(gm, pair)
    packed = batch(LENGTHS, 1013)
    values = run(gm, pair, packed)
    (node,) = called(gm, VOCAB_EMBEDDING)
    for rank, rows in enumerate(values[node]):
        ((start, stop),) = VOCAB.intervals(rank)
        outside = (packed.input_ids < start) | (packed.input_ids >= stop)
        assert bool(outside.any()) and not bool(rows[outside].any())
        assert bool((rows[~outside] != 0).all(-1).all())


def _no_mask(weight: torch.Tensor, ids: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    return weight[(ids - first_row).clamp(0, len(weight) - 1)]


def _no_offset(weight: torch.Tensor, ids: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    rows = weight[ids.clamp(0, len(weight) - 1)]
    return rows * (ids < len(weight)).unsqueeze(-1)


def _even_offset(weight: torch.Tensor, ids: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Compute the offset as if all shards were as long as this one."""
    start = len(weight) * round(first_row / len(weight))
    return SPECS[VOCAB_EMBEDDING].reference(weight, ids, start)


@pytest.mark.parametrize("mistake", [_no_mask, _no_offset, _even_offset])
def test_16_a_vocabulary_shard_read_wrongly(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., torch.Tensor]
) -> None:
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 4)
    spec = SPECS[VOCAB_EMBEDDING]
    monkeypatch.setitem(SPECS, VOCAB_EMBEDDING, dataclasses.replace(spec, target=_called(mistake)))
    assert error_of(gm, pair, (60,)) > VISIBLE


def _called(mistake: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda weight, ids, first_row: mistake(weight, ids, first_row)


def test_16_a_plain_lookup_into_a_shard() -> None:
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 4)
    (node,) = called(gm, VOCAB_EMBEDDING)
    node.target = EMBEDDING
    assert "vocab-offset" in rules_broken(gm)


def test_16_rows_padded_to_a_multiple_never_reach_the_logits() -> None:
    """A vocabulary of 1013, which is prime, has unpadded logits and a shorter last shard."""
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 4)
    assert stage_logits(gm, pair, batch((3,), 1013)).shape == (3, 1013)
    table = made_of(gm, "embed_tokens")
    padded_up = Layout("vocab", 1016, 1, even_runs(1016, 4))
    kind = value_type(table)
    set_parameter(table, dataclasses.replace(parameter_of(table), type=kind.sharded(0, padded_up)))
    assert rules_broken(gm) == {"layout"}


def test_17_inference_mode_in_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers do not enter inference mode: only the caller decides."""
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 2)
    for rank in range(2):
        source = CompiledModel.simulated(pair.captured, gm, [], pair.read).source(rank)
        assert "inference_mode" not in source and "no_grad" not in source

    def marked() -> bool:
        """Return whether any value of the graph is an inference tensor."""
        packed = batch((3,), 1013)
        inputs = {
            "input_ids": packed.input_ids, "positions": packed.positions,
            "starts": packed.starts, "logit_rows": packed.logit_rows,
        }  # fmt: skip
        values = run_ranks(gm, inputs, materialise(gm, pair.read), pair.captured.rotary.fresh())
        tensors = [t for ranks in values.values() for t in ranks if isinstance(t, torch.Tensor)]
        return any(tensor.is_inference() for tensor in tensors)

    assert not marked()
    inside = torch.inference_mode()(lambda *given: RMS_NORM(*given))
    monkeypatch.setitem(SPECS, RMS_NORM, dataclasses.replace(SPECS[RMS_NORM], target=inside))
    assert marked()


def _positions_with_padding(ids: torch.Tensor, mask: torch.Tensor) -> Packed:
    packed = pack(ids, mask)
    columns = torch.arange(ids.shape[1]).expand_as(ids)
    return dataclasses.replace(packed, positions=columns[mask.bool()] * 2)


def _attention_over_padding(ids: torch.Tensor, mask: torch.Tensor) -> Packed:
    """Pack padding as visible tokens, with correct positions."""
    seen = pack(ids, torch.ones_like(mask), (mask.cumsum(1) - 1).clamp(min=0))
    real = mask.bool().flatten().nonzero().flatten()
    return dataclasses.replace(seen, logit_rows=real)


@pytest.mark.parametrize("mistake", [_positions_with_padding, _attention_over_padding])
def test_18_left_padding(mistake: Callable[..., Packed]) -> None:
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 2)
    ids, mask = padded(LENGTHS, 1013)
    found = stage_logits(gm, pair, pack(ids, mask))
    alone = [
        stage_logits(gm, pair, pack(row[real.bool()][None]))
        for row, real in zip(ids, mask, strict=True)
    ]
    assert relative_error(found, torch.cat(alone)) < TOLERANCE, "padding changes nothing"
    expected = eager_logits(pair.eager, LENGTHS)
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(stage_logits(gm, pair, mistake(ids, mask)), expected) > VISIBLE


def test_19_near_ties_are_told_by_error_and_not_by_token() -> None:
    """Logits are compared by error: rounding may swap near ties, a real mistake may swap none."""
    tied = torch.tensor([[1.0, 1.0 + 1e-7, 0.0]])
    rounded = torch.tensor([[1.0 + 2e-7, 1.0, 0.0]])
    assert rounded.argmax() != tied.argmax()
    assert relative_error(rounded, tied) < TOLERANCE
    wrong = tied * 1.01
    assert wrong.argmax() == tied.argmax()
    assert relative_error(wrong, tied) > VISIBLE
    assert relative_error(torch.tensor([[float("nan")] * 3]), tied) == float("inf")


@dataclasses.dataclass(frozen=True)
class Bf16:
    """A model captured in bf16, and Hugging Face's logits in bf16 and fp32 of the same weights."""

    pair: Pair
    ids: torch.Tensor
    theirs: torch.Tensor
    exact: torch.Tensor


def _loaded(name: str, read: RandomWeights, dtype: torch.dtype) -> Any:
    """Load Hugging Face's model with its default attention; it keeps the new configuration."""
    model: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(**preset(name))
    made = model.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    read.load_into(made)
    return made


@lru_cache
def in_bf16(name: str) -> Bf16:
    captured = captured_once(AutoConfig.for_model(**preset(name)), dtype=torch.bfloat16)
    read = RandomWeights(captured, 0)
    models = [_loaded(name, read, dtype) for dtype in (torch.bfloat16, torch.float32)]
    ids = torch.randint(1013, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        theirs, exact = (model(ids).logits.flatten(0, 1).float() for model in models)
    return Bf16(Pair(captured, models[0], read), ids, theirs, exact)


NOISE = 1.001
"""The allowance for bf16 sums in another order, which round a few values differently."""


def mean_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square error, which no single rounding dominates."""
    return float((found.float() - expected).square().mean().sqrt())


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3"])
def test_20_bf16_is_no_further_from_fp32_than_hugging_face_s(name: str, tp: int) -> None:
    case = in_bf16(name)
    gm = lowered(case.pair, tp)
    assert rules_broken(gm) == set()
    found = stage_logits(gm, case.pair, pack(case.ids))
    assert found.dtype == torch.bfloat16
    assert mean_error(found, case.exact) <= NOISE * mean_error(case.theirs, case.exact)


def test_20_a_norm_computed_in_bf16_is_further(monkeypatch: pytest.MonkeyPatch) -> None:
    case = in_bf16("tiny-qwen3")
    gm = lowered(case.pair, 2, "insert-collectives")

    def narrow(x: torch.Tensor, weight: torch.Tensor, eps: float, _: bool) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    monkeypatch.setitem(SPECS, RMS_NORM, dataclasses.replace(SPECS[RMS_NORM], target=narrow))
    found = stage_logits(gm, case.pair, pack(case.ids))
    assert mean_error(found, case.exact) > NOISE * mean_error(case.theirs, case.exact)


# Shapes.


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("tp", range(2, 9))
def test_21_no_column_is_dropped(name: str, tp: int) -> None:
    """Each column of the real models' widths is on one rank; flooring would drop some."""
    values = preset(name)
    for size in (values["intermediate_size"], values["vocab_size"]):
        layout = plan_axis("axis", size, tp)
        assert layout.refusal() is None and layout.overlap() is None
        assert sum(layout.extent(rank) for rank in range(tp)) == size
        floored = tuple((((size // tp) * r, (size // tp) * (r + 1)),) for r in range(tp))
        refusal = Layout("axis", size, 1, floored).refusal()
        assert (refusal is None) == (size % tp == 0)
        assert refusal is None or f"({size % tp} missing)" in refusal


def test_21_floored_columns_in_a_graph() -> None:
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 3, "insert-collectives")
    assert_good(gm, pair)
    floored = Layout("ffn", 176, 1, tuple(((58 * r, 58 * (r + 1)),) for r in range(3)))
    for projection, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        weight = made_of(gm, f"layers.0.mlp.{projection}")
        whole = Parameter.replicated(parameter_of(weight).whole, torch.float32, 3)
        set_parameter(weight, whole.sharded(dim, floored))
    problems = check_graph(gm)
    assert [problem.rule for problem in problems] == ["layout"] * 3
    assert "174 (2 missing)" in problems[0].got
    assert error_of(gm, pair) > VISIBLE


@pytest.mark.parametrize("name", ["tiny-qwen3", "qwen3-0.6b"])
def test_22_attention_is_heads_times_width_wide(name: str) -> None:
    pair = preset_pair(name)
    config = pair.captured.config
    wide = config.num_attention_heads * config.head_dim
    assert wide != config.hidden_size
    gm = lowered(pair, 2)
    assert_good(gm, pair)
    weight = made_of(gm, "layers.0.self_attn.o_proj")
    assert value_type(weight).shape == (config.hidden_size, wide)
    layout = Layout("q_heads", config.hidden_size, 1, even_runs(config.hidden_size, 2))
    whole = parameter_of(weight).whole
    narrow = Parameter.replicated(whole, torch.float32, 2).sharded(1, layout)
    set_parameter(weight, narrow)
    assert "layout" in rules_broken(gm)


def odd_config(**changes: Any) -> Any:
    values = {**preset("tiny-qwen3"), "num_hidden_layers": 1, "num_attention_heads": 3}
    return AutoConfig.for_model(**{**values, "num_key_value_heads": 1, **changes})


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_23_heads_of_every_width(head_dim: int) -> None:
    pair = pair_of(odd_config(head_dim=head_dim, intermediate_size=91, vocab_size=211))
    for tp in (1, 2, 3):
        assert_good(lowered(pair, tp), pair)


def test_23_eps_from_the_config() -> None:
    pair = pair_of(odd_config(rms_norm_eps=1e-2))
    gm = lowered(pair, 2, "insert-collectives")
    assert_good(gm, pair)
    norms = called(gm, RMS_NORM)
    assert {norm.args[2] for norm in norms} == {1e-2}
    for norm in norms:
        norm.args = (*norm.args[:2], 1e-6)
    assert error_of(gm, pair) > VISIBLE


def test_24_an_export_of_one_token() -> None:
    """The captured graph supports any length; one specialised to length 1 is refused."""
    pair = preset_pair("tiny-qwen3")
    captured = pair.captured.graph
    inputs = [node for node in captured.graph.nodes if node.op == "placeholder"]
    assert value_type(inputs[0]).shape == ("T",)
    for lengths in ((1,), (2,), (33,), (1, 1)):
        assert error_of(captured, pair, lengths) < TOLERANCE
    gm, _ = run_passes(captured, [])
    extents = called(gm, aten.sym_size.int)
    assert extents, "captured views must use the symbolic number of tokens"
    for extent in extents:
        extent.replace_all_uses_with(1)  # type: ignore[arg-type]
    assert "view" in rules_broken(gm)
