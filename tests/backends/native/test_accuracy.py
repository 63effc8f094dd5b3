"""Decode steps of the native executor against Hugging Face eager: fp32 tokens and bf16 errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tpcompile
from tests.models import scaled_config
from tests.runtime.eager_pair import enlivened, prompt
from tpcompile.demo import model
from tpcompile.demo.model import make_demo
from tpcompile.runtime.cache_name import CACHE

pytestmark = pytest.mark.usefixtures("captured_once")

NEW = 256
NOISE = 1.01
"""The allowance for bf16 sums in another order, which round a few values differently."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, list[int]]:
    """Return a demo model that has learned some of its text, a prompt, and eager's tokens."""
    directory = tmp_path_factory.mktemp("trained") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "SHAPES", ((8, 64),))  # short rows are enough to learn some
        make_demo(directory, steps=75)
    eager: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory)("The grey cat of")["input_ids"]])
    return directory, ids, eager.generate(ids, **_greedy(eager))[0].tolist()


def _greedy(model: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}


@pytest.mark.parametrize("tp", [1, 3])
def test_fp32_tokens_equal_eager_s(tp: int, demo: tuple[Path, torch.Tensor, list[int]]) -> None:
    directory, ids, expected = demo
    assert len(set(expected)) > 20, "the demo model repeats itself"
    with tpcompile.compile(directory, tp=tp, backend="native", simulate=True) as compiled:
        assert compiled.generate(ids, **_greedy(compiled))[0].tolist() == expected
        assert compiled.steps.program == NEW - 1


_OTHERS = [
    *[("qwen3-0.6b", {"hidden_act": act}) for act in ("gelu", "gelu_pytorch_tanh", "relu")],
    ("qwen2.5-0.5b", {"model_type": "arcee", "hidden_act": "relu2"}),
]
"""Other activations; the last has no gate."""


@pytest.mark.parametrize(
    ("name", "changes", "tp"),
    [
        *[(name, {}, tp) for name in ("qwen2.5-0.5b", "qwen3-0.6b") for tp in (1, 2)],
        *[(*other, 1) for other in _OTHERS],
    ],
)
def test_the_error_of_bf16_is_not_above_eager_s(
    name: str, changes: dict[str, Any], tp: int
) -> None:
    """The error is that of decode steps, against fp32 logits of the same weights."""
    dtypes = (torch.bfloat16, torch.float32)
    eager, exact = (enlivened(scaled_config(name, **changes), dtype) for dtype in dtypes)
    ids = prompt(64, 64, 64)["input_ids"]
    with tpcompile.compile(eager, tp=tp, backend="native", simulate=True, max_batch=3) as compiled:
        ours, theirs, truth = (_decoded(side, ids) for side in (compiled, eager, exact))
        assert compiled.steps.program == ids.shape[1]
    assert _error(ours, truth) <= NOISE * _error(theirs, truth)


def _decoded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of all tokens but the first, decoded one by one."""
    rows, past = [], None
    with torch.inference_mode():
        for column in ids.T[:, :, None]:
            output = model(column, use_cache=True, **{CACHE: past})
            past = output[CACHE]
            rows.append(output.logits.float())
    return torch.cat(rows[1:], 1)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).square().mean().sqrt())
