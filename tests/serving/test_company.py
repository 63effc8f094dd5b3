"""Prompts in company: the logits after a prompt have the bits that they have alone."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import tpcompile
from tests.runtime.eager_pair import lively
from tpcompile.serving import Engine, SamplingParams

LENGTHS = (1, 2, 3, 17, 31, 33, 63, 64, 65, 77, 97, 100, 101, 127)


@pytest.mark.parametrize(
    ("name", "tp"), [("tiny-qwen3", 1), ("tiny-qwen3.5", 2), ("tiny-qwen3.5", 3)]
)
def test_chunks_of_all_lengths_share_a_run(name: str, tp: int) -> None:
    """The widths of a rank are no multiples of a vector, so places of elements matter."""
    dice = Random(3)
    prompts = [[dice.randrange(1013) for _ in range(length)] for length in LENGTHS]
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=20)

    def answers(engine: Engine, together: bool) -> list[Any]:
        if not together:
            return [engine.add(prompt, params, salt=prompt[0]).result() for prompt in prompts]
        return [handle.result() for handle in [engine.add(prompt, params) for prompt in prompts]]

    with tpcompile.compile(lively(name), tp, max_seq_len=160) as model:
        with Engine(model, max_batch=len(prompts), chunk=64) as engine:
            alone = answers(engine, together=False)
            assert engine.steps >= len(prompts)
        with Engine(model, max_batch=len(prompts), chunk=64) as engine:
            assert answers(engine, together=True) == alone
            assert engine.steps < len(prompts) / 2
