"""Several rows of one sequence in a step on native threads: the bits of steps with one row."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from tests.backends.reference.step_models import WIDE_HEADS
from tests.backends.reference.stepping import Case
from tests.backends.reference.test_rows import (
    LENGTHS,
    MODELS,
    ROWS,
    logits_of_rows,
    logits_of_steps,
    same,
)
from tpcompile.backends.native import Native
from tpcompile.backends.native.build import paths


def check(case: Case, path: str) -> None:
    rows, steps = (Native(variant.memory(), path) for variant in (case, replace(case, rows=())))
    with closing(rows), closing(steps):
        assert same(logits_of_rows(rows, case), logits_of_steps(steps, case))


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("kv", ["model", "int8"])
@pytest.mark.parametrize("model", MODELS)
def test_rows_have_the_bits_of_steps(model: str, kv: str, path: str) -> None:
    for tp, policy, workers in ((1, "dynamic", 3), (2, "critical-path", 2)):
        spans = 3 if tp == 1 else 1
        check(
            Case(model, tp, LENGTHS, spans, policy=policy, workers=workers, rows=ROWS, kv=kv), path
        )


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("spans", [1, 2])
def test_rows_attend_together_to_more_tokens_than_are_mixed_at_a_time(
    spans: int, path: str
) -> None:
    """Six rows of three heads are more than attend together."""
    check(Case(WIDE_HEADS, lengths=(17, 31), spans=spans, workers=2, rows=(2, 6)), path)
