"""Torch modules on a GPU: device placement, KV blocks, generation and bf16."""

from __future__ import annotations

import copy

import pytest
import torch

import tpcompile
from tests.models import relative_error
from tests.runtime.eager_pair import lively

GPU = torch.device("cuda")
IDS = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
"""A batch with padding on the left."""


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_logits_are_those_of_eager(name: str, tp: int) -> None:
    eager = lively(name).to(GPU)
    with tpcompile.compile(eager, tp, backend="torch", device="cuda", simulate=True) as model:
        assert model.device.type == "cuda"
        logits = model(IDS.to(GPU), attention_mask=MASK.to(GPU)).logits
        assert logits.device.type == "cuda"
    with torch.inference_mode():
        wanted = eager(IDS.to(GPU), attention_mask=MASK.to(GPU)).logits
    real = MASK.bool()
    assert relative_error(logits[real], wanted[real]) < 1e-5


@pytest.mark.parametrize("tp", [1, 2])
def test_generation_uses_the_cache(tp: int) -> None:
    eager = lively("tiny-qwen3").to(GPU)
    options = {"attention_mask": MASK.to(GPU), "max_new_tokens": 40, "do_sample": False}
    with tpcompile.compile(eager, tp, backend="torch", device="cuda", simulate=True) as model:
        tokens = model.generate(IDS.to(GPU), **options)
        assert model.steps.modules == 40
    assert tokens.tolist() == eager.generate(IDS.to(GPU), **options).tolist()


def test_inputs_may_be_on_the_cpu() -> None:
    with tpcompile.compile(lively("tiny-qwen3"), backend="torch", device="cuda") as model:
        assert model(IDS).logits.device.type == "cpu"


def test_errors_of_bf16_are_those_of_eager() -> None:
    exact = lively("tiny-qwen3").to(GPU)
    rough = copy.deepcopy(exact).bfloat16()
    with torch.inference_mode():
        wanted, theirs = (model(IDS.to(GPU)).logits.float() for model in (exact, rough))
    with tpcompile.compile(rough, backend="torch", device="cuda") as model:
        logits = model(IDS.to(GPU)).logits.float()
    assert (logits - wanted).norm() <= 1.1 * (theirs - wanted).norm()
