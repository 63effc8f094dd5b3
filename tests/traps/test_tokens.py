"""Traps 15 to 20: tied weights, the vocabulary, padding, and rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.captures import captured_once
from tests.models import (
    TOLERANCE,
    Pair,
    batch,
    eager_logits,
    load_into,
    padded,
    preset_pair,
    relative_error,
    run,
    stage_logits,
)
from tests.traps.detection import (
    LENGTHS,
    VISIBLE,
    assert_good,
    called,
    error_of,
    lowered,
    made_of,
    rules_broken,
)
from tpcompile.ir.layout import Layout, even_runs
from tpcompile.ir.meta import (
    new_parameter,
    origin_of,
    parameter_of,
    set_parameter,
    value_type,
)
from tpcompile.ir.ops import (
    EMBEDDING,
    LINEAR,
    RMS_NORM,
    SPECS,
    VOCAB_EMBEDDING,
)
from tpcompile.ir.simulate import materialise, run_ranks
from tpcompile.presets import preset
from tpcompile.runtime.kv.packing import Packed, pack
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.weights import RandomWeights


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
    inside = torch.inference_mode()(lambda *inputs: RMS_NORM(*inputs))
    monkeypatch.setitem(SPECS, RMS_NORM, dataclasses.replace(SPECS[RMS_NORM], target=inside))
    assert marked()


def _positions_with_padding(ids: torch.Tensor, mask: torch.Tensor) -> Packed:
    packed = pack(ids, mask)
    columns = torch.arange(ids.shape[1]).expand_as(ids)
    return dataclasses.replace(packed, positions=columns[mask.bool()] * 2)


def _attention_over_padding(ids: torch.Tensor, mask: torch.Tensor) -> Packed:
    """Pack padding as visible tokens, with correct positions."""
    packed = pack(ids, torch.ones_like(mask), (mask.cumsum(1) - 1).clamp(min=0))
    real = mask.bool().flatten().nonzero().flatten()
    return dataclasses.replace(packed, logit_rows=real)


@pytest.mark.parametrize("mistake", [_positions_with_padding, _attention_over_padding])
def test_18_left_padding(mistake: Callable[..., Packed]) -> None:
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 2)
    ids, mask = padded(LENGTHS, 1013)
    logits = stage_logits(gm, pair, pack(ids, mask))
    alone = [
        stage_logits(gm, pair, pack(row[real.bool()][None]))
        for row, real in zip(ids, mask, strict=True)
    ]
    assert relative_error(logits, torch.cat(alone)) < TOLERANCE, "padding changes nothing"
    expected = eager_logits(pair.eager, LENGTHS)
    assert relative_error(logits, expected) < TOLERANCE
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
    loaded = model.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    load_into(loaded, read)
    return loaded


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


def mean_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square error, which no single rounding dominates."""
    return float((actual.float() - expected).square().mean().sqrt())


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3"])
def test_20_bf16_is_no_further_from_fp32_than_hugging_face_s(name: str, tp: int) -> None:
    case = in_bf16(name)
    gm = lowered(case.pair, tp)
    assert rules_broken(gm) == set()
    logits = stage_logits(gm, case.pair, pack(case.ids))
    assert logits.dtype == torch.bfloat16
    assert mean_error(logits, case.exact) <= NOISE * mean_error(case.theirs, case.exact)


def test_20_a_norm_computed_in_bf16_is_further(monkeypatch: pytest.MonkeyPatch) -> None:
    case = in_bf16("tiny-qwen3")
    gm = lowered(case.pair, 2, "insert-collectives")

    def narrow(x: torch.Tensor, weight: torch.Tensor, eps: float, _: bool) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    monkeypatch.setitem(SPECS, RMS_NORM, dataclasses.replace(SPECS[RMS_NORM], target=narrow))
    logits = stage_logits(gm, case.pair, pack(case.ids))
    assert mean_error(logits, case.exact) > NOISE * mean_error(case.theirs, case.exact)
