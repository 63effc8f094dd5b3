"""Tests of weights in formats: tiles of few bits multiply what the reference machine multiplies."""

from __future__ import annotations

import pytest
import torch

from tests.backends.programs import memory_of
from tests.backends.reference.step_models import (
    EVEN,
    HYBRID,
    INT4,
    INT4_EXPERTS,
    INT4_WIDE,
    INT8,
    ONE_LAYER,
)
from tests.backends.reference.stepping import Case, steps_of, steps_on
from tests.backends.triton.test_triton import EXACT
from tests.models import relative_error
from tpcompile.backends.executor import Executor
from tpcompile.backends.reference import Machine
from tpcompile.backends.triton import Triton
from tpcompile.runtime.ranks.step import size_for
from tpcompile.vm.program.weight import Weight

pytestmark = pytest.mark.usefixtures("verified_once")

FORMATS = ("int8:row", "int8:32", "int4:32", "fp8:row", "fp8:32", "fp8:128")
_OCTETS = torch.arange(256, dtype=torch.uint8)


def _logits(
    kind: type[Executor],
    few_bits: str | None,
    tokens: torch.Tensor,
    tp: int = 1,
    dtype: torch.dtype = torch.float32,
    model: str = ONE_LAYER,
    wide: int = 0,
) -> torch.Tensor:
    """Return the logits of sequences of one token each, in fp32."""
    batch = len(tokens)
    rows = size_for(batch, kind.size_parts)
    executor = kind(memory_of(model, dtype, tp, rows, few_bits=few_bits, wide=wide))
    executor.place(tokens, torch.ones(batch, dtype=torch.long), torch.arange(batch)[:, None])
    executor.run()
    return executor.logits[:batch].float()


def tokens_of(batch: int) -> torch.Tensor:
    return 5 * torch.arange(batch) % 199


_BATCHES = [
    *((few_bits, 3, 2) for few_bits in FORMATS),
    *((few_bits, (1, 5)[place % 2], 1) for place, few_bits in enumerate(FORMATS)),
    (None, 5, 1),
    (None, 11, 2),
    ("int8:32", 16, 1),
    ("fp8:32", 11, 1),
    ("int4:32", 33, 1),
]
"""Five sequences are in a program of six rows, 11 in one of twelve, and 33 in one of 48."""


@pytest.mark.parametrize(("few_bits", "batch", "tp"), _BATCHES)
def test_batches_are_those_of_the_reference_machine(
    few_bits: str | None, batch: int, tp: int
) -> None:
    actual, expected = (_logits(kind, few_bits, tokens_of(batch), tp) for kind in (Triton, Machine))
    assert relative_error(actual, expected) < EXACT


@pytest.mark.parametrize("few_bits", ["int8:64", "int8:128", "int4:64", "int4:128"])
def test_wide_groups(few_bits: str) -> None:
    actual, expected = (
        _logits(kind, few_bits, tokens_of(2), 1, model=EVEN, wide=32) for kind in (Triton, Machine)
    )
    assert relative_error(actual, expected) < EXACT


@pytest.mark.parametrize(
    "case",
    [
        Case(INT4, lengths=(9, 3), policy="dynamic", workers=8),
        Case(INT4, tp=2, lengths=(5,), lowering="rows"),  # ranks cut groups of 32 columns
        Case(INT4, lengths=(5,), column_splits=2),  # the second half begins within a group
        Case(INT4_WIDE, tp=3, lengths=(5,)),  # ranks cut groups of 48 columns
        Case(INT8, tp=2, lengths=(4,), interleaved=True),
        Case(INT4_EXPERTS, tp=2, lengths=(5, 2)),
        Case(INT4_EXPERTS, tp=5, lengths=(3,)),  # ranks cut groups of 32 columns of experts
    ],
    ids=[
        *("offsets", "cut groups, row blocks", "columns split", "three ranks", "a head in int8"),
        *("experts", "cut groups of experts"),
    ],
)
def test_checkpoints_in_few_bits(case: Case) -> None:
    (actual,), (expected,) = steps_on(Triton(case.memory()), case, 1), steps_of(case, 1)
    assert relative_error(actual, expected) < EXACT


@pytest.mark.parametrize(
    ("few_bits", "batch", "tp"),
    [("int8:row", 1, 2), ("int8:32", 9, 1), ("int4:32", 3, 2), ("fp8:32", 1, 1)],
)
def test_linear_attention(few_bits: str, batch: int, tp: int) -> None:
    actual, expected = (
        _logits(kind, few_bits, tokens_of(batch), tp, model=HYBRID) for kind in (Triton, Machine)
    )
    assert relative_error(actual, expected) < EXACT


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_embeddings_in_few_bits(kind: str) -> None:
    """A GGUF file has its embedding in the format of the other weights, with scales in fp16."""
    actual, expected = (_logits(executor, kind, tokens_of(3), 2) for executor in (Triton, Machine))
    assert relative_error(actual, expected) < EXACT


def test_every_octet_of_8_bit_floating_point() -> None:
    """The values of all weights are all finite octets in turn."""
    finite = _OCTETS[~_OCTETS.view(torch.float8_e4m3fn).float().isnan()]
    logits = []
    for kind in (Triton, Machine):
        memory = memory_of(ONE_LAYER, torch.float32, 1, 1, few_bits="fp8:row")
        for number, buffer in enumerate(memory.program.buffers):
            if buffer.format is not None:
                rows, columns = buffer.shape
                octets = finite.repeat(rows * columns // len(finite) + 1)[: rows * columns]
                values = octets.view(rows, columns).view(torch.float8_e4m3fn)
                parts = {**memory.tensors[number].parts, "": values}
                memory.tensors[number] = Weight(buffer.format, parts, buffer.columns)
        executor = kind(memory)
        executor.place(torch.tensor([7]), torch.tensor([1]), torch.tensor([[0]]))
        executor.run()
        logits.append(executor.logits.clone())
    assert relative_error(*logits) < EXACT


@pytest.mark.parametrize("few_bits", ["int8:32", "int4:32", "fp8:32"])
@pytest.mark.parametrize(
    ("batch", "dtype"),
    [
        (9, torch.float32),
        pytest.param(33, torch.bfloat16, marks=pytest.mark.slow),  # two blocks
    ],
)
def test_a_sequence_has_the_same_bits_in_every_batch(
    few_bits: str, batch: int, dtype: torch.dtype
) -> None:
    """Tiles for many sequences have fewer columns."""
    logits = _logits(Triton, few_bits, tokens_of(batch), dtype=dtype)
    assert torch.equal(_logits(Triton, few_bits, tokens_of(1), dtype=dtype)[0], logits[0])
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("few_bits", ["int8:32", "int4:32", "fp8:32"])
def test_16_bits(few_bits: str) -> None:
    """The error relative to fp32 is at most 1.5 times that of the reference machine."""
    exact = _logits(Machine, few_bits, tokens_of(2))
    errors = [
        relative_error(_logits(kind, few_bits, tokens_of(2), dtype=torch.bfloat16), exact)
        for kind in (Triton, Machine)
    ]
    assert errors[0] <= 1.5 * errors[1]
