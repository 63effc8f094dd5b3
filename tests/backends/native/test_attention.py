"""Attention to a cache in int8: kernels that multiply integers agree with the reference machine."""

from __future__ import annotations

from collections.abc import Sequence
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

pytestmark = pytest.mark.usefixtures("captured_once")

LONGEST = 230
SHAPES = [(2, 1, 16), (7, 1, 64), (9, 3, 40), (4, 2, 128), (3, 3, 80)]
"""Query heads, KV heads and the width of a head: also widths that fill no register."""
CASES = [
    *((shape, dtype) for dtype in (torch.bfloat16, torch.float32) for shape in SHAPES),
    *((shape, torch.float16) for shape in SHAPES[2:4]),
]
"""Kernels of 16-bit dtypes multiply the same integers, and differ in loads and stores alone."""
LENGTHS = (200, 65, 64, 3, 1)
"""Chunks of 64 tokens: several, a whole one, and parts of one. A step writes the row of its token,
which shorter sequences do not read, so all lengths have the same memory."""


@lru_cache
def step(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int | None, spans: int
) -> Program:
    heads, shared, width = shape
    settings: dict[str, Any] = {
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
        settings |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    config = AutoConfig.for_model(**settings)
    return tpcompile.schedule(
        config, target="cpu", workers=2, dtype=dtype, max_seq_len=LONGEST, kv="int8", spans=spans
    ).program


@lru_cache
def reference_partials(program_of: tuple[Any, ...]) -> list[list[torch.Tensor]]:
    """Return what the reference machine computes, which is the same for all vector paths."""
    return partials(Machine(RandomMemory().memory(step(*program_of))), LENGTHS)


def partials(executor: Executor, lengths: Sequence[int]) -> list[list[torch.Tensor]]:
    """Return the queries of steps, and the values and log-sum-exp of their spans."""
    buffers = executor.memory.program.buffers
    steps = []
    for length in lengths:
        place_full(executor, length)
        executor.run(1)
        steps.append(
            [
                executor.memory.tensors[number].clone()
                for name in ("q", "partial_values", "partial_lse")
                for number, buffer in enumerate(buffers)
                if buffer.name == name
            ]
        )
    executor.close()
    return steps


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_spans_are_those_of_the_reference_machine(
    shape: tuple[int, int, int], dtype: torch.dtype, path: str
) -> None:
    """Queries may differ by a unit of their dtype, and so may the results of attention."""
    for spans, window in ((1, None), (3, None), (2, 70)):
        program_of = (shape, dtype, window, spans)
        memory = RandomMemory().memory(step(*program_of))
        for tensors, references in zip(
            partials(Native(memory, path), LENGTHS), reference_partials(program_of), strict=True
        ):
            for tensor, expected in zip(tensors, references, strict=True):
                finite = expected.isfinite()
                assert torch.equal(finite, tensor.isfinite())
                size = expected[finite].abs().max()
                limit = 2**-7 if tensor.dtype != torch.float32 else 2**-9
                assert float((tensor[finite].float() - expected[finite].float()).abs().max()) <= (
                    limit * float(size)
                )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_that_is_nan_reaches_the_result(dtype: torch.dtype) -> None:
    memory = RandomMemory().memory(step(SHAPES[3], dtype, None, 1))
    (cache,) = memory.values(Role.CACHE)
    cache[0, 1, 70, 1] = int(nan_element(cache))
    ((_, values, lse),) = partials(Native(memory), [150])
    assert values[0, 2:].isnan().all() and values[0, :2].isfinite().all()
    assert lse.isfinite().all()
