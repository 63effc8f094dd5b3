"""The KV cache has two names in Hugging Face's interface; a compiled model takes both."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.runtime.eager_pair import PAD, Both, listening, prompt, tiny_both
from tpcompile.errors import UsageError
from tpcompile.runtime.cache_name import CACHE, NAMES, given_cache, renamed

IDS = prompt(9)["input_ids"]


@pytest.fixture(scope="module")
def pair() -> Both:
    return tiny_both()


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """Fail at any warning, also at those that pytest's configuration ignores."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_the_name_is_that_of_hugging_faces_models() -> None:
    assert CACHE in inspect.signature(Qwen3ForCausalLM.forward).parameters


@pytest.mark.parametrize("name", NAMES)
def test_forward_takes_both_names(pair: Both, name: str) -> None:
    cache = pair.compiled.new_cache()
    pair.compiled(IDS[:, :5], **{name: cache})
    output = pair.compiled(IDS[:, 5:], **{name: cache})
    assert output[CACHE] is cache and cache.get_seq_length() == 9
    with torch.inference_mode():
        expected = pair.eager(IDS).logits[:, 5:]
    torch.testing.assert_close(output.logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}])
@pytest.mark.parametrize("name", NAMES)
def test_generate_takes_both_names(pair: Both, name: str, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 4, "pad_token_id": PAD, **options}
    with listening() as heard:
        alone, continued = (
            model.generate(IDS, **inputs, **options)
            for model, inputs in zip(
                pair.each(), ({}, {name: pair.compiled.new_cache()}), strict=True
            )
        )
    assert alone.tolist() == continued.tolist()
    assert not heard


def test_generate_returns_the_cache_under_the_installed_versions_name(pair: Both) -> None:
    output = pair.compiled.generate(
        IDS, max_new_tokens=3, pad_token_id=PAD, return_dict_in_generate=True
    )
    assert output[CACHE].get_seq_length() == 9 + 2
    again = pair.compiled.generate(
        torch.cat([output.sequences, IDS], 1),
        max_new_tokens=3,
        pad_token_id=PAD,
        **{CACHE: output[CACHE]},
    )
    assert again.shape[1] == 9 + 3 + 9 + 3


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_prepared_under_the_installed_versions_name(pair: Both, name: str) -> None:
    cache = pair.compiled.new_cache()
    inputs = pair.compiled.prepare_inputs_for_generation(IDS, **{name: cache})
    assert inputs[CACHE] is cache
    assert set(NAMES) & set(inputs) == {CACHE}


def test_both_names_at_once_are_refused(pair: Both) -> None:
    cache = pair.compiled.new_cache()
    with pytest.raises(UsageError, match="cache and past_key_values are two names"):
        pair.compiled(IDS, past_key_values=cache, cache=cache)
    with pytest.raises(UsageError, match="cache and past_key_values are two names"):
        pair.compiled.generate(IDS, past_key_values=cache, cache=cache)


def test_arguments_without_a_cache_stay_the_same() -> None:
    assert renamed({"use_cache": True}) == {"use_cache": True}
    assert renamed(dict.fromkeys(NAMES)) == {CACHE: None}
    assert given_cache({"use_cache": True}) is None
