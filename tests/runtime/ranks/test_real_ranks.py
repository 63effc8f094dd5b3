"""Models of the official shapes on real processes agree with Hugging Face eager.

A model is compiled once for each number of ranks; all checks on it run there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tpcompile
from tests.models import TOLERANCE, relative_error, scaled_config
from tests.runtime.eager_pair import PAD, enlivened, prompt
from tpcompile.demo.model import make_demo
from tpcompile.runtime.ranks.program import ProgramRanks
from tpcompile.runtime.ranks.spawned import SpawnedRanks

pytestmark = pytest.mark.usefixtures("forked_launchers")

NEW = 64

NOISE = 1.01
"""Tolerance for bf16 sums in another order, which round a few values differently."""

NAMES = ("qwen2.5-0.5b", "qwen3-0.6b")
"""14 query heads over 2 KV heads with biases, and 16 over 8 with per-head norms; both tied."""


@lru_cache
def _eager(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return enlivened(scaled_config(name), dtype)


REAL_IN_BF16 = (("qwen2.5-0.5b", 3), ("qwen3-0.6b", 2))


@contextmanager
def _compiled(source: Any, tp: int, **options: Any) -> Iterator[tpcompile.CompiledModel]:
    with tpcompile.compile(source, tp=tp, **options) as model:
        real = tp > 1 and not options.get("simulate")
        assert isinstance(model._ranks, ProgramRanks)
        assert isinstance(model._ranks._modules, SpawnedRanks) == real
        yield model


def _greedy(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": PAD}
    tokens: torch.Tensor = model.generate(**inputs, **settings, eos_token_id=None, **options)
    return tokens


def _logits(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, attention_mask=mask).logits
    return logits[mask.bool()].float()


def _check_sampling(model: Any, eager: Any) -> None:
    """Assert that sampling equals eager's, and therefore does not depend on tp."""
    texts = []
    for candidate in (eager, model):
        torch.manual_seed(9)
        texts.append(
            candidate.generate(
                **prompt(6, 3), do_sample=True, top_k=40, max_new_tokens=16, pad_token_id=PAD
            ).tolist()
        )
    assert texts[0] == texts[1]


def _check_weights(model: Any, eager: Any) -> None:
    for name, parameter in eager.named_parameters(remove_duplicate=False):
        gathered = model.gather_weight(name)
        assert gathered.dtype == parameter.dtype and torch.equal(gathered, parameter), name


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_fp32(name: str, tp: int, tmp_path: Path) -> None:
    """tp=3 is compiled from memory, other tp from a checkpoint."""
    eager: Any = _eager(name)
    source: Any = eager
    if tp != 3:
        source = tmp_path
        eager.save_pretrained(tmp_path)
    inputs = prompt(5, 11)
    expected = _greedy(eager, inputs)
    assert len(set(expected[0].tolist())) > NEW / 2
    with _compiled(source, tp) as model:
        assert _greedy(model, inputs).tolist() == expected.tolist()
        mask = inputs["attention_mask"]
        logits = _logits(model, inputs["input_ids"], mask)
        assert relative_error(logits, _logits(eager, inputs["input_ids"], mask)) < TOLERANCE
        _check_sampling(model, eager)
        _check_weights(model, eager)


def _error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).square().mean().sqrt())


def _check_by_teacher_forcing(
    tokens: Sequence[int], start: int, theirs: torch.Tensor, margin: float
) -> int:
    """Return how many tokens are not eager's best; assert that these are within the margin.

    `theirs` are eager's logits along the generated text.
    """
    misses = 0
    for place in range(start, len(tokens)):
        row = theirs[place - 1]
        if tokens[place] != int(row.argmax()):
            assert float(row.max() - row[tokens[place]]) <= margin, place
            misses += 1
    return misses


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_bf16(name: str, tp: int, request: pytest.FixtureRequest) -> None:
    """Without --slow only a few combinations start processes, which takes seconds."""
    simulate = (name, tp) not in REAL_IN_BF16 and not request.config.getoption("--slow")
    eager, exact = _eager(name, torch.bfloat16), _eager(name)
    ids = prompt(64, 64, 64)["input_ids"]
    mask = torch.ones_like(ids)
    with _compiled(eager, tp, simulate=simulate) as model:
        theirs, truth = _logits(eager, ids, mask), _logits(exact, ids, mask)
        assert _error(_logits(model, ids, mask), truth) <= NOISE * _error(theirs, truth)
        inputs = prompt(7)
        start = inputs["input_ids"].shape[1]
        tokens = _greedy(model, inputs)
        forced = [_logits(module, tokens, torch.ones_like(tokens)) for module in (eager, exact)]
    # A difference of two logits, each with eager's error.
    margin = 4 * float((forced[0] - forced[1]).abs().max())
    misses = _check_by_teacher_forcing(tokens[0].tolist(), start, forced[0], margin)
    assert misses <= NEW / 8


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_the_demo(tp: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A trained model has no near ties, so bf16 gives the text of fp32."""
    directory = _demo(tmp_path_factory.getbasetemp())
    eager = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    inputs = {"input_ids": torch.tensor([[40, 41, 42, 43]])}
    expected = _greedy(eager, inputs)
    for options in ({}, {"dtype": "bfloat16"}):
        with _compiled(directory, tp, **options) as model:
            assert _greedy(model, inputs).tolist() == expected.tolist()


@lru_cache
def _demo(base: Path) -> Path:
    make_demo(base / "demo")
    return base / "demo"
