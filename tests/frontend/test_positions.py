"""Tests of the longest sequence that a configuration allows."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

import tpcompile
from tpcompile.errors import UsageError
from tpcompile.frontend.positions import longest_of
from tpcompile.presets import preset

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LIMITS: dict[str, tuple[dict[str, Any], int]] = {
    "no scaling": ({"rope_type": "default"}, 512),
    "yarn": (YARN, 2048),
    "yarn within the positions": ({**YARN, "original_max_position_embeddings": 64}, 512),
    "dynamic": ({"rope_type": "dynamic", "factor": 3.0}, 1536),
    "linear, already in the positions": ({"rope_type": "linear", "factor": 8.0}, 512),
}


def config(rope: dict[str, Any]) -> Any:
    parameters = {"rope_theta": 10_000.0, **rope}
    return AutoConfig.for_model(**{**preset("tiny-qwen3"), "rope_parameters": parameters})


@pytest.mark.parametrize("name", LIMITS)
def test_the_longest_sequence(name: str) -> None:
    rope, limit = LIMITS[name]
    assert longest_of(config(rope)) == 512
    assert longest_of(config(rope), limit) == limit
    with pytest.raises(UsageError, match=rf"max_seq_len must be at most {limit:,}, the positions"):
        longest_of(config(rope), limit + 1)


def test_scalings_per_type_of_layer() -> None:
    nested = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
    stated = AutoConfig.for_model(**preset("tiny-qwen3"))
    stated.rope_parameters = nested
    assert longest_of(stated, 2048) == 2048


def test_compile_refuses_a_longer_one() -> None:
    with pytest.raises(UsageError, match=r"at most 512.*Found 513\. Longer sequences need"):
        tpcompile.compile("preset:tiny-qwen3", random_weights=0, max_seq_len=513)
