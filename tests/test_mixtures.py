"""Mixtures of experts of any shape, at any tp and with any plan, give Hugging Face's logits."""

from __future__ import annotations

import copy
import dataclasses
from functools import lru_cache
from statistics import geometric_mean
from typing import Any

import pytest
import torch

import tpcompile
from tests.captures import captured_once
from tests.mixtures import FAMILIES, VOCABULARY, lively_mixture, random_mixture
from tests.models import TOLERANCE, relative_error
from tests.test_hybrids import answers, mean_error
from tpcompile.errors import ShardingError, UsageError
from tpcompile.options import passes_for
from tpcompile.passes import run_passes
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.weights import weights_of

SEEDS = range(2)
PLANS = [(1, "auto"), (2, "tp"), (2, "ep"), (3, "ep"), (4, "tp"), (5, "tp"), (5, "ep")]
"""Each configuration is compiled with every second of them."""


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two prompts, of which one is padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (2, 13), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids, mask


@lru_cache
def eager(family: str, seed: int) -> Any:
    return lively_mixture(random_mixture(seed, family), seed)


def compiled(model: Any, tp: int, experts: str) -> CompiledModel:
    """Compile a model for ranks in this process. Models of one configuration share a capture."""
    captured = captured_once(model)
    graph, stages = run_passes(captured.graph, passes_for(None, tp, experts=experts))
    captured = dataclasses.replace(captured, model=model)
    return CompiledModel.simulated(captured, graph, stages, weights_of(captured, model, None))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_configuration_at_any_tp_with_any_plan(family: str, seed: int) -> None:
    model, inputs = eager(family, seed), batch(seed)
    expected = answers(model, *inputs)
    count = model.config.num_experts
    for tp, experts in PLANS[seed::2]:
        if experts == "ep" and count < tp:
            with pytest.raises(ShardingError, match=f"The {count} experts"):
                compiled(model, tp, experts)
            continue
        with compiled(model, tp, experts) as sharded:
            for actual, expected_step in zip(answers(sharded, *inputs), expected, strict=True):
                assert relative_error(actual, expected_step) < TOLERANCE, (tp, experts)


def test_the_configurations_differ() -> None:
    """They have experts chosen once or often, few or many, normalised or not, in some layers."""
    drawn = [eager(family, seed).config for family in FAMILIES for seed in SEEDS]
    assert {c.num_experts_per_tok for c in drawn} >= {1, 8}
    assert {c.num_experts for c in drawn} >= {2, 16}
    with_norm = [c for c in drawn if hasattr(c, "norm_topk_prob")]
    assert {c.norm_topk_prob for c in with_norm} == {False, True}
    assert {bool(c.mlp_only_layers) for c in with_norm} == {False, True}
    assert {c.decoder_sparse_step for c in with_norm} == {1, 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_eager(family: str) -> None:
    model, (ids, _) = eager(family, 1), batch(1)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    for experts in ("tp", "ep"):
        with compiled(model, 2, experts) as sharded:
            assert torch.equal(sharded.generate(ids, max_new_tokens=6, do_sample=False), expected)


def test_a_token_does_not_depend_on_the_others() -> None:
    """Results of experts are added per token, so a prompt alone has the bits of a batch."""
    model, (ids, _) = eager("qwen3_moe", 0), batch(0)
    with compiled(model, 2, "ep") as sharded, torch.inference_mode():
        batched = sharded(ids).logits
        assert relative_error(batched[:1], sharded(ids[:1]).logits) < TOLERANCE


def test_in_bf16_the_error_is_not_above_hugging_face_s() -> None:
    """The mean ratio over configurations, each against eager in fp32 with the same weights."""
    ratios = []
    for family in FAMILIES:
        model, inputs = eager(family, 0), batch(0)
        exact = answers(model, *inputs)
        narrow = copy.deepcopy(model).to(torch.bfloat16)
        theirs = mean_error(answers(narrow, *inputs), exact)
        with compiled(narrow, 2, "auto") as sharded:
            ratios.append(mean_error(answers(sharded, *inputs), exact) / theirs)
    assert geometric_mean(ratios) <= 1, ratios


def test_a_program_of_experts_with_few_features() -> None:
    """A rank has fewer features of an expert than a sum has leaves."""
    narrow = random_mixture(0, "qwen3_moe", moe_intermediate_size=5, mlp_only_layers=[])
    model, (ids, _) = lively_mixture(narrow), batch(0)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    with tpcompile.compile(model, 2, experts="tp", simulate=True, backend="reference") as sharded:
        assert torch.equal(sharded.generate(ids, **options), expected)
        assert sharded.steps.program > 0


def test_capture_changes_no_configuration() -> None:
    model = eager("qwen3_moe", 0)
    before = copy.deepcopy(model.config.to_dict()), model.config._experts_implementation
    tpcompile.capture(model)
    assert (model.config.to_dict(), model.config._experts_implementation) == before
    assert before[1] == "eager"


def test_weights_are_whole_again() -> None:
    model = eager("qwen3_5_moe_text", 0)
    for experts in ("tp", "ep"):
        with compiled(model, 2, experts) as sharded:
            for name, parameter in model.named_parameters():
                assert torch.equal(sharded.gather_weight(name), parameter), name


def test_the_option_of_compile() -> None:
    model, (ids, _) = eager("qwen3_moe", 0), batch(0)
    with torch.inference_mode():
        expected = model(ids).logits
    with tpcompile.compile(model, 2, experts="ep", simulate=True, backend="torch") as sharded:
        assert [rank.experts for rank in sharded.plan.ranks] == [model.config.num_experts // 2] * 2
        assert relative_error(sharded(ids).logits, expected) < TOLERANCE
    with pytest.raises(UsageError, match="experts must be one of auto, tp, ep, got 'pt'"):
        tpcompile.compile(model, 2, experts="pt", simulate=True, backend="torch")


def test_a_configuration_that_asks_for_router_logits() -> None:
    """The setting is ignored: a call returns them if its argument says so."""
    model = lively_mixture(random_mixture(0, "qwen3_moe", output_router_logits=True))
    ids, _ = batch(0)
    with compiled(model, 2, "auto") as sharded, torch.inference_mode():
        expected = model(ids, output_router_logits=False).logits
        assert relative_error(sharded(ids).logits, expected) < TOLERANCE
    assert model.config.output_router_logits
