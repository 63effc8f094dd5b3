"""The logits of routers and their loss are those of Hugging Face, for prompts and for decoding."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import tpcompile
from tests.mixtures import FAMILIES, VOCABULARY, lively_mixture, random_mixture
from tests.models import TOLERANCE, relative_error
from tests.runtime.eager_pair import lively
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.cache_name import CACHE

pytestmark = pytest.mark.usefixtures("captured_once", "forked_launchers")


@lru_cache
def eager(family: str) -> Any:
    return lively_mixture(random_mixture(1, family), 1)


def ids_of(length: int = 7) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(3))


def compiled(model: Any, tp: int, **options: Any) -> Any:
    return tpcompile.compile(model, tp, **{"simulate": True, "backend": "torch", **options})


def assert_same(actual: Any, expected: Any, mask: torch.Tensor | None = None) -> None:
    """Compare logits, router logits without those of padding, and losses."""
    assert type(actual) is type(expected)
    real = slice(None) if mask is None else mask.flatten().bool()
    assert len(actual.router_logits) == len(expected.router_logits) > 0
    for ours, theirs in zip(actual.router_logits, expected.router_logits, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert relative_error(ours[real], theirs[real]) < TOLERANCE
    assert torch.allclose(actual.aux_loss, expected.aux_loss, rtol=1e-5)
    assert actual.logits.shape == expected.logits.shape
    rows = slice(None) if mask is None else mask.bool()
    assert relative_error(actual.logits[rows], expected.logits[rows]) < TOLERANCE


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_tokens_with_a_cache(family: str, tp: int) -> None:
    model, ids = eager(family), ids_of()
    with compiled(model, tp) as compiled_model, torch.inference_mode():
        pasts: list[dict[str, Any]] = [{}, {}]
        for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
            options: dict[str, Any] = {"use_cache": True, "output_router_logits": True}
            expected, actual = (
                call(part, **options, **past)
                for call, past in zip((model, compiled_model), pasts, strict=True)
            )
            assert_same(actual, expected)
            pasts = [{CACHE: expected[CACHE]}, {CACHE: actual[CACHE]}]


def test_padding_counts_for_no_loss() -> None:
    model, ids = eager("qwen3_moe"), ids_of()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with compiled(model, 2) as compiled_model, torch.inference_mode():
        options = {"attention_mask": mask, "use_cache": False, "output_router_logits": True}
        actual = compiled_model(ids, **options)
        assert_same(actual, model(ids, **options), mask)
    assert all(bool((logits[:3] == 0).all()) for logits in actual.router_logits)


@pytest.mark.parametrize("keep", [1, 0])
def test_all_tokens_have_router_logits_whatever_logits_are_kept(keep: int) -> None:
    model, ids = eager("qwen2_moe"), ids_of()
    with compiled(model, 1) as compiled_model, torch.inference_mode():
        options = {"logits_to_keep": keep, "output_router_logits": True}
        assert_same(compiled_model(ids, **options), model(ids, **options))


def test_as_a_tuple() -> None:
    model, ids = eager("qwen3_moe"), ids_of()
    with compiled(model, 1) as compiled_model, torch.inference_mode():
        options = {"use_cache": False, "return_dict": False, "output_router_logits": True}
        actual, expected = compiled_model(ids, **options), model(ids, **options)
        assert [type(value) for value in actual] == [type(value) for value in expected]
        assert compiled_model(ids, use_cache=False, return_dict=False)[0].shape == actual[1].shape


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_modules_run_the_steps_of_programs(backend: str) -> None:
    """Steps that ask for router logits may alternate with those of the program."""
    model, ids = eager("qwen3_moe"), ids_of()
    with compiled(model, 2, backend=backend) as compiled_model, torch.inference_mode():
        past = compiled_model(ids[:, :-3], use_cache=True)
        programs, modules, *_ = compiled_model.steps
        past = compiled_model(ids[:, -3:-2], use_cache=True, **{CACHE: past[CACHE]})
        assert compiled_model.steps[:2] == (programs + 1, modules)
        output = compiled_model(ids[:, -2:-1], output_router_logits=True, **{CACHE: past[CACHE]})
        assert compiled_model.steps[:2] == (programs + 1, modules + 1)
        last = compiled_model(ids[:, -1:], **{CACHE: output[CACHE]})
        assert compiled_model.steps[:2] == (programs + 2, modules + 1)
        whole = model(ids, output_router_logits=True)
    for ours, theirs in zip(output.router_logits, whole.router_logits, strict=True):
        assert relative_error(ours, theirs.unflatten(0, ids.shape)[:, -2]) < TOLERANCE
    assert relative_error(last.logits[:, -1], whole.logits[:, -1]) < TOLERANCE


def test_ranks_in_processes() -> None:
    model, ids = eager("qwen3_moe"), ids_of()
    with compiled(model, 2, simulate=False) as compiled_model, torch.inference_mode():
        options = {"use_cache": False, "output_router_logits": True}
        assert_same(compiled_model(ids, **options), model(ids, **options))


def test_bf16_logits_are_exact() -> None:
    """The result has odd offsets in memory, and one row of logits."""
    model, ids = lively_mixture(random_mixture(1, "qwen3_moe"), 1, torch.bfloat16), ids_of(3)
    with compiled(model, 1) as compiled_model, torch.inference_mode():
        output = compiled_model(ids[:1], logits_to_keep=1, output_router_logits=True)
        assert torch.equal(output.logits, compiled_model(ids[:1], logits_to_keep=1).logits)
        assert {logits.dtype for logits in output.router_logits} == {torch.bfloat16}


def test_refusals() -> None:
    ids = ids_of()
    with compiled(eager("qwen3_moe"), 1) as compiled_model:
        with pytest.raises(UsageError, match="output_router_logits must be True, False or None"):
            compiled_model(ids, output_router_logits="yes")
        with pytest.raises(UsageError, match="output_router_logits and greedy exclude each other"):
            compiled_model(ids, output_router_logits=True, greedy=True)
    with compiled(lively("tiny-qwen3"), 1) as compiled_model:
        assert compiled_model(ids, output_router_logits=False).logits is not None
        with pytest.raises(UnsupportedError, match="output_router_logits without routers"):
            compiled_model(ids, output_router_logits=True)
