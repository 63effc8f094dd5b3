"""Attention to a cache in int8: kernels that multiply integers agree with the reference machine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import tpcompile
from tpcompile.backends.executor import Executor
from tpcompile.backends.measuring import RandomMemory, place_full
from tpcompile.backends.native import Native
from tpcompile.backends.native.build import paths
from tpcompile.backends.reference import Machine
from tpcompile.ir.kv import nan_element
from tpcompile.presets import preset
from tpcompile.vm.program import Program, Role

LONGEST = 230
SHAPES = [(2, 1, 16), (7, 1, 64), (9, 3, 40), (4, 2, 128), (3, 3, 80)]
"""Query heads, KV heads and the width of a head: also widths that fill no register."""
LENGTHS = (1, 3, 64, 65, 200)
"""Chunks of 64 tokens: parts of one, a whole one, and several."""


@lru_cache
def step(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int | None, spans: int
) -> Program:
    heads, shared, width = shape
    own: dict[str, Any] = {
        **preset("tiny-qwen2"),
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": width,
        "hidden_size": heads * width,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": 256,
    }
    if window is not None:
        own |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    config = AutoConfig.for_model(**own)
    return tpcompile.schedule(
        config, target="cpu", workers=2, dtype=dtype, max_seq_len=LONGEST, kv="int8", spans=spans
    ).program


def partials(executor: Executor, length: int) -> list[torch.Tensor]:
    """Return the queries of a step, and the values and log-sum-exp of its spans."""
    place_full(executor, length)
    executor.run(1)
    buffers = executor.memory.program.buffers
    names = ("q", "partial_values", "partial_lse")
    found = [
        executor.memory.tensors[number].clone()
        for name in names
        for number, buffer in enumerate(buffers)
        if buffer.name == name
    ]
    executor.close()
    return found


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_spans_are_those_of_the_reference_machine(
    shape: tuple[int, int, int], dtype: torch.dtype, path: str
) -> None:
    """Queries may differ by a unit of their dtype, and so may the results of attention."""
    for spans, window in ((1, None), (3, None), (2, 70)):
        program = step(shape, dtype, window, spans)
        for length in LENGTHS:
            wanted = partials(Machine(RandomMemory().memory(program)), length)
            found = partials(Native(RandomMemory().memory(program), path), length)
            for own, right in zip(found, wanted, strict=True):
                finite = right.isfinite()
                assert torch.equal(finite, own.isfinite())
                size = right[finite].abs().max()
                limit = 2**-7 if own.dtype != torch.float32 else 2**-9
                assert float((own[finite].float() - right[finite].float()).abs().max()) <= (
                    limit * float(size)
                )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_that_is_nan_reaches_the_result(dtype: torch.dtype) -> None:
    memory = RandomMemory().memory(step(SHAPES[3], dtype, None, 1))
    (cache,) = memory.values(Role.CACHE)
    cache[0, 1, 70, 1] = int(nan_element(cache))
    _, values, lse = partials(Native(memory), 150)
    assert values[0, 2:].isnan().all() and values[0, :2].isfinite().all()
    assert lse.isfinite().all()
