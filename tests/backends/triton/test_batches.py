"""Tests of batches: a tile of weights is read once, and sequences do not change each other."""

from __future__ import annotations

import pytest
import torch

from tests.backends.programs import memory_of
from tests.backends.reference.stepping import FEW_TOKENS, Case, steps_of, steps_on
from tests.backends.triton.test_triton import EXACT
from tests.models import relative_error
from tpcompile.backends.triton import Triton

BATCHES = (1, 2, 3, 8, 16, 33, 64)
_EDGES = (1, 4, 5, 9, 3)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("tp", [1, 2])
def test_batches_are_those_of_the_reference_machine(batch: int, tp: int) -> None:
    lengths = tuple(_EDGES[n % len(_EDGES)] for n in range(batch))
    case = Case(FEW_TOKENS, tp=tp, lengths=lengths)
    (found,) = steps_on(Triton(case.memory()), case, 1)
    assert relative_error(found, steps_of(case, 1)[0]) < EXACT


@pytest.mark.parametrize(
    ("batch", "dtype", "wide"),
    [
        (3, torch.float32, False),
        (17, torch.bfloat16, False),
        pytest.param(33, torch.float32, True, marks=pytest.mark.slow),  # tiles of fewer columns
        pytest.param(65, torch.float32, False, marks=pytest.mark.slow),  # read in two parts
    ],
)
def test_a_sequence_has_the_same_bits_in_every_batch_and_order(
    batch: int, dtype: torch.dtype, wide: bool
) -> None:
    tokens = 5 * torch.arange(batch) % 199
    found = _second_logits(tokens, dtype, wide)
    assert torch.equal(_second_logits(tokens.flip(0), dtype, wide).flip(0), found)
    assert torch.equal(_second_logits(tokens[:1], dtype, wide)[0], found[0])
    assert not torch.equal(found[0], found[1])


def _second_logits(tokens: torch.Tensor, dtype: torch.dtype, wide: bool) -> torch.Tensor:
    """Return the logits of the second step of sequences that begin with these tokens."""
    batch = len(tokens)
    executor = Triton(memory_of(FEW_TOKENS, dtype, 1, batch, wide=wide))
    executor.place(tokens, torch.ones(batch, dtype=torch.long), torch.arange(batch)[:, None])
    executor.run(2)
    return executor.logits.clone()
