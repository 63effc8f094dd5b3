"""Several rows of one sequence in a step of the Triton kernel."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from tests.backends.reference.step_models import FEW_TOKENS
from tests.backends.reference.stepping import BLOCK, Case
from tests.backends.reference.test_rows import logits_of_rows, logits_of_steps
from tpcompile.backends.triton import Triton

pytestmark = pytest.mark.usefixtures("verified_once")


@pytest.mark.parametrize(("tp", "count"), [(1, 4), (2, 3)])
def test_rows_have_the_bits_of_steps(tp: int, count: int) -> None:
    case = Case(FEW_TOKENS, tp, (2 * BLOCK - 1,), rows=(count,), spans=2)
    rows, steps = (Triton(variant.memory()) for variant in (case, replace(case, rows=())))
    with closing(rows), closing(steps):
        actual, expected = logits_of_rows(rows, case)[0], logits_of_steps(steps, case)[0]
    assert torch.equal(actual, expected)
