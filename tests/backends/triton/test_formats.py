"""Tests of the formats of weights that have no tiles: they are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.backends.programs import memory_of
from tests.backends.reference.step_models import INT4_WIDE, ONE_LAYER
from tests.backends.reference.stepping import Case
from tpcompile.backends.triton import Triton
from tpcompile.backends.triton.branches import branch_of
from tpcompile.backends.triton.emit import emit
from tpcompile.errors import UnsupportedError
from tpcompile.ir.format import Format


@pytest.mark.parametrize(
    ("few_bits", "expected"),
    [
        ("Q5_0", "int5:32:f16"),
        ("Q6_K", "int6:16:super"),
        ("Q4_1", "int4:32:f16min"),
        ("Q4_K", "int4:32:supermin"),
        ("int8:32:a8", "int8:32:f32:a8"),
    ],
)
def test_other_formats_are_refused_by_name(few_bits: str, expected: str) -> None:
    program = memory_of(ONE_LAYER, torch.float32, 1, 1, few_bits=few_bits).program
    with pytest.raises(UnsupportedError, match=rf"cannot read weights in {expected}\. At \w+"):
        Triton.check(program)
    with pytest.raises(UnsupportedError, match=rf"cannot read weights in {expected}\. At \w+"):
        emit(program)


def test_groups_that_end_within_16_columns_are_refused() -> None:
    program = memory_of(ONE_LAYER, torch.float32, 1, 1, few_bits="int8:32").program
    head = next(head for head in program.instructions if head.name == "norm_lm_head")
    narrow = replace(head, at=replace(head.at, format=Format.int8(torch.float32, 24)))
    with pytest.raises(UnsupportedError, match=r"16 columns at a time.*int8:24:f32, from column 0"):
        branch_of(program, narrow)


def test_columns_that_begin_within_16_are_refused() -> None:
    program = Case(INT4_WIDE, tp=2, lengths=(5,), column_splits=2).program
    with pytest.raises(UnsupportedError, match="from column 24 on"):
        Triton.check(program)
