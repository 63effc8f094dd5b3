"""Models whose KV cache is in int8: backends, chunks, copies, plans, errors and refusals."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch

import tpcompile
from tests.logits import BACKENDS, in_turn
from tests.models import TOLERANCE, relative_error
from tests.runtime.eager_pair import lively
from tpcompile.compare.rounded_cache import RoundedCache
from tpcompile.errors import CompileError, UnsupportedError, UsageError
from tpcompile.ir.kv import ROUNDED
from tpcompile.runtime.cache_name import CACHE

IDS = torch.randint(1, 1000, (2, 40), generator=torch.Generator().manual_seed(0))


def compiled(name: str, **options: Any) -> tpcompile.CompiledModel:
    return tpcompile.compile(lively(name), simulate=True, **{"kv": "int8", **options})


@lru_cache
def eager_logits(name: str) -> torch.Tensor:
    """Return the logits of eager whose cache rounds as ours does."""
    eager: Any = lively(name)
    with torch.inference_mode():
        past = {CACHE: RoundedCache(ROUNDED, eager.config)}
        logits: torch.Tensor = eager(IDS, use_cache=True, **past).logits
    return logits


def one_by_one(model: Any, cache: Any, first: int) -> torch.Tensor:
    """Return the logits of the tokens from `first` on, each in a step of its own."""
    steps = range(first, IDS.shape[1])
    logits = [model(IDS[:, column : column + 1], past_key_values=cache).logits for column in steps]
    return torch.cat(logits, 1)


@pytest.mark.parametrize(("name", "backend", "tp"), in_turn(["tiny-qwen2", "tiny-qwen3"]))
def test_prompts_and_steps_are_eager_s(name: str, backend: str, tp: int) -> None:
    with compiled(name, tp=tp, backend=backend) as model:
        whole = model(IDS)
        assert relative_error(whole.logits, eager_logits(name)) < TOLERANCE
        cache = model(IDS[:, :30], use_cache=True).past_key_values
        steps = one_by_one(model, cache, 30)
        assert relative_error(steps, eager_logits(name)[:, 30:]) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_of_a_prompt(backend: str) -> None:
    """Tokens attend to the stored keys and values of their own chunk."""
    with compiled("tiny-qwen3", backend=backend) as model:
        whole = model(IDS).logits
        cache, parts = model.new_cache(), []
        for first, last in ((0, 7), (7, 8), (8, 33), (33, 40)):
            parts.append(model(IDS[:, first:last], past_key_values=cache).logits)
        assert relative_error(torch.cat(parts, 1), whole) < TOLERANCE


def test_chunks_of_a_prompt_have_the_same_bits_in_bf16() -> None:
    """Steps of several tokens per sequence run the kernels of prompts."""
    eager = lively("tiny-qwen3", head_dim=32).bfloat16()
    with tpcompile.compile(eager, kv="int8", backend="native") as model:
        whole = model(IDS).logits
        cache, parts = model.new_cache(), []
        for first, last in ((0, 7), (7, 33), (33, 40)):
            parts.append(model(IDS[:, first:last], past_key_values=cache).logits)
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_copies_of_a_cache_hold_the_scales(backend: str) -> None:
    """A copied cache shares blocks, and copies the last one before it writes there."""
    with compiled("tiny-qwen3", tp=2, backend=backend) as model:
        cache = model(IDS[:, :20], use_cache=True).past_key_values
        other = copy.deepcopy(cache)
        model(IDS.flip(0)[:, 20:27], past_key_values=other)
        assert relative_error(one_by_one(model, cache, 20), eager_logits("tiny-qwen3")[:, 20:]) < (
            TOLERANCE
        )
        cache.crop(25)
        assert relative_error(one_by_one(model, cache, 25), eager_logits("tiny-qwen3")[:, 25:]) < (
            TOLERANCE
        )


def test_beams_share_and_copy_blocks() -> None:
    options = {"num_beams": 3, "max_new_tokens": 40, "do_sample": False}
    with compiled("tiny-qwen3", backend="torch") as first, compiled("tiny-qwen3") as second:
        tokens = [model.generate(IDS[:1], **options) for model in (first, second)]
    assert torch.equal(*tokens)


def test_the_error_is_below_that_of_weights_in_int8() -> None:
    """Also with weights in few bits, to which that of the cache adds little."""
    with torch.inference_mode():
        exact = lively("tiny-qwen3")(IDS).logits
    errors = []
    for options in ({}, {"kv": None, "weights": "int8"}, {"weights": "int8"}):
        with compiled("tiny-qwen3", tp=2, backend="torch", **options) as model:
            errors.append(float((model(IDS).logits - exact).square().mean().sqrt()))
    cache, weights, combined = errors
    assert 0 < cache < weights and combined < 1.5 * weights


def test_bytes_per_token() -> None:
    """Two sides of two layers, with 2 heads of 16 values on each of two ranks."""
    with compiled("tiny-qwen3", tp=2) as model:
        ranks = model.plan.to_json()["ranks"]
        assert [rank["kv_bytes_per_token"] for rank in ranks] == [
            2 * 2 * rank["kv_heads"] * (16 + 4) for rank in ranks
        ]


REFUSALS: dict[str, tuple[dict[str, Any], type[CompileError], str]] = {
    "another dtype": ({"kv": "int4"}, UsageError, "kv must be one of int8, or None"),
    "a number": ({"kv": 8}, UsageError, "got 8"),
    "no cache": ({"pipeline": "canonicalize"}, UsageError, "no KV cache"),
    "triton": ({"backend": "triton"}, UnsupportedError, "triton.* a KV cache in int8:row:f32"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    options, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message):
        compiled("tiny-qwen3", **options)


def test_the_source_of_a_kernel_is_refused() -> None:
    step = tpcompile.schedule("preset:tiny-qwen3", target="h200", kv="int8")
    with pytest.raises(UnsupportedError, match="triton backend cannot read a KV cache in int8"):
        step.kernel()


def test_the_option_of_the_pass_is_that_of_compile() -> None:
    text = "standard{kv=int8}"
    with compiled("tiny-qwen3", kv=None, pipeline=text, backend="torch") as model:
        assert relative_error(model(IDS).logits, eager_logits("tiny-qwen3")) < TOLERANCE
    with pytest.raises(UsageError, match="kv must be one of model, int8, got 'int7'"):
        compiled("tiny-qwen3", kv=None, pipeline="standard{kv=int7}")
