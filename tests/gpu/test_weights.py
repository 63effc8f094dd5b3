"""Weights of all formats on a GPU: numbers, and the same bits for every batch and worker."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.backends.programs import memory_of
from tests.backends.reference.step_models import EIGHT_OF_MANY, EVEN, EXPERTS, FEW_TOKENS, HYBRID
from tests.backends.triton.test_triton import EXACT
from tests.backends.triton.test_weights import tokens_of
from tests.models import relative_error
from tpcompile.backends.executor import Executor
from tpcompile.backends.reference import Machine
from tpcompile.backends.triton import Triton
from tpcompile.ir.dtypes import dtype_name

GPU = torch.device("cuda")
FORMATS: dict[str, tuple[str, str | None]] = {
    "plain": (FEW_TOKENS, None),
    "int8": (FEW_TOKENS, "int8:row"),
    "int8, groups": (FEW_TOKENS, "int8:32"),
    "int4": (EVEN, "int4:64"),
    "fp8": (FEW_TOKENS, "fp8:128"),
    "fp8, a head of the dtype": (FEW_TOKENS, "fp8:128:head"),
}
OTHERS: dict[str, tuple[str, str | None]] = {
    "linear attention in int8": (HYBRID, "int8:32"),
    "linear attention in int4": (HYBRID, "int4:32"),
    "experts": (EIGHT_OF_MANY, None),
    "experts in int8": (EXPERTS, "int8:32"),
    "experts in int4": (EXPERTS, "int4:32"),
}


def _logits(
    kind: type[Executor],
    of: str,
    tokens: torch.Tensor,
    dtype: torch.dtype,
    steps: int = 1,
    **options: Any,
) -> torch.Tensor:
    """Return the logits of sequences of one token each after some steps, in fp32."""
    model, few_bits = (FORMATS | OTHERS)[of]
    batch = len(tokens)
    device = GPU if kind is Triton else torch.device("cpu")
    executor = kind(memory_of(model, dtype, 1, batch, few_bits=few_bits, device=device, **options))
    executor.place(tokens, torch.ones(batch, dtype=torch.long), torch.arange(batch)[:, None])
    executor.run(steps)
    return executor.logits.float().cpu()


@pytest.mark.parametrize(
    ("of", "batch"),
    [
        *product(FORMATS, (1, 3, 33)),
        ("linear attention in int8", 3),
        ("linear attention in int4", 9),
        *product(("experts", "experts in int8", "experts in int4"), (1, 20)),
    ],
)
def test_logits_are_those_of_the_reference_machine(of: str, batch: int) -> None:
    actual, expected = (
        _logits(kind, of, tokens_of(batch), torch.float32) for kind in (Triton, Machine)
    )
    assert relative_error(actual, expected) < EXACT


@pytest.mark.parametrize("of", FORMATS)
@pytest.mark.parametrize("batch", [2, 64])
def test_16_bits(of: str, batch: int) -> None:
    """The error relative to fp32 is at most 1.5 times that of the reference machine."""
    exact = _logits(Machine, of, tokens_of(batch), torch.float32)
    errors = [
        relative_error(_logits(kind, of, tokens_of(batch), torch.bfloat16), exact)
        for kind in (Triton, Machine)
    ]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("of", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_bits_depend_neither_on_the_batch_nor_on_the_workers(of: str, dtype: torch.dtype) -> None:
    """A sequence has the same bits alone, among few and among many, for 1, 8 and 100 workers."""
    wanted = _logits(Triton, of, tokens_of(1), dtype, 2)[0]
    for batch in (2, 4, 9, 64, 65):
        logits = _logits(Triton, of, tokens_of(batch), dtype, 2)
        assert torch.equal(logits[0], wanted), batch
        assert not torch.equal(logits[1], wanted), batch
    for workers in (1, 8, 100):
        logits = _logits(Triton, of, tokens_of(4), dtype, 2, workers=workers)
        assert torch.equal(logits[0], wanted), workers
