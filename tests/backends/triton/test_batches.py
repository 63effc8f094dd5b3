"""Tests of batches: a tile of weights is read once, and sequences do not change each other."""

from __future__ import annotations

import pytest
import torch

from tests.backends.programs import memory_of
from tests.backends.reference.step_models import HYBRID, ONE_LAYER
from tests.backends.reference.stepping import Case, steps_of, steps_on
from tests.backends.triton.test_triton import EXACT
from tests.models import relative_error
from tpcompile.backends.triton import Triton

pytestmark = pytest.mark.usefixtures("verified_once")

BATCHES = (1, 2, 3, 8, 16, 33, 64)
_EDGES = (1, 4, 5, 9, 3)


@pytest.mark.parametrize(
    ("model", "tp", "batch"),
    [
        *((ONE_LAYER, 1 + place % 2, batch) for place, batch in enumerate(BATCHES)),
        *((HYBRID, tp, batch) for tp, batch in ((1, 1), (2, 2), (3, 9), (1, 33))),
    ],
)
def test_batches_are_those_of_the_reference_machine(model: str, tp: int, batch: int) -> None:
    lengths = tuple(_EDGES[n % len(_EDGES)] for n in range(batch))
    case = Case(model, tp=tp, lengths=lengths)
    (logits,) = steps_on(Triton(case.memory()), case, 1)
    assert relative_error(logits, steps_of(case, 1)[0]) < EXACT


@pytest.mark.parametrize(
    ("model", "batch", "dtype", "wide"),
    [
        (ONE_LAYER, 3, torch.float32, False),
        (ONE_LAYER, 9, torch.bfloat16, False),
        (HYBRID, 9, torch.bfloat16, False),
        # tiles of fewer columns
        pytest.param(ONE_LAYER, 33, torch.float32, True, marks=pytest.mark.slow),
        # read in two parts
        pytest.param(ONE_LAYER, 65, torch.float32, False, marks=pytest.mark.slow),
        pytest.param(HYBRID, 65, torch.bfloat16, False, marks=pytest.mark.slow),
    ],
)
def test_a_sequence_has_the_same_bits_in_every_batch_and_order(
    model: str, batch: int, dtype: torch.dtype, wide: bool
) -> None:
    logits = _second_logits(model, there_and_back(batch), dtype, wide)
    assert torch.equal(logits.flip(0), logits)
    assert torch.equal(_second_logits(model, there_and_back(1), dtype, wide)[0], logits[0])
    assert not torch.equal(logits[0], logits[1])


def there_and_back(batch: int) -> torch.Tensor:
    """Return tokens of which each stands at two places of a batch, but for the one in the middle.

    The first ones are those of every batch.
    """
    tokens = 5 * torch.arange((batch + 1) // 2) % 199
    return torch.cat([tokens, tokens[: batch // 2].flip(0)])


def _second_logits(
    model: str, tokens: torch.Tensor, dtype: torch.dtype, wide: bool
) -> torch.Tensor:
    """Return the logits of the second step of sequences that begin with these tokens."""
    batch = len(tokens)
    executor = Triton(memory_of(model, dtype, 1, batch, wide=wide))
    executor.place(tokens, torch.ones(batch, dtype=torch.long), torch.arange(batch)[:, None])
    executor.run(2)
    return executor.logits.clone()
