"""Rows of a linear agree with the op for any split of the rows."""

from __future__ import annotations

import pytest
import torch

from tests.vm.groups.desk import Desk, cuts, near, random, unknown
from tpcompile.ir.ops import NORM_LINEAR
from tpcompile.vm.groups import NormRows
from tpcompile.vm.groups.normed import Normed
from tpcompile.vm.groups.rows import RowsOperands, Wanted
from tpcompile.vm.program import Format
from tpcompile.vm.program.instruction import to_fp32

BATCH, HIDDEN, WIDTH, EPS = 3, 10, 13, to_fp32(1e-5)
WHOLE = ((), (4, 8, 12), (1,))


def _ran(
    edges: tuple[int, ...], biased: bool, zero_centered: bool, plain: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the instructions store, and what the op computes."""
    x, norm = random(BATCH, HIDDEN), random(HIDDEN, seed=1)
    weight, bias = random(WIDTH, HIDDEN, seed=2), random(WIDTH, seed=3) if biased else None
    desk = Desk()
    centred = zero_centered and not plain
    normed = Normed(desk.put(x), desk.put(norm), BATCH, HIDDEN, EPS, centred)
    operands = RowsOperands(
        rank=0,
        layer=1,
        normed=normed,
        weight=desk.put(weight),
        bias=desk.put(bias),
        out=desk.put(unknown(BATCH, WIDTH)),
        width=WIDTH,
        format=Format.of(torch.float32),
        wanted=Wanted.GATES,
    )
    desk.run([NormRows(operands, rows) for rows in cuts(WIDTH, *edges)])
    output = desk.tensors[operands.out]
    assert torch.equal(desk.seen("gates", BATCH, WIDTH), output)
    return output, NORM_LINEAR(x, norm, EPS, weight, bias, zero_centered)


@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain norm", "zero-centred norm"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("edges", WHOLE, ids=str)
def test_as_the_op(edges: tuple[int, ...], biased: bool, zero_centered: bool) -> None:
    assert near(*_ran(edges, biased, zero_centered))


def test_the_same_bits_whoever_has_which_rows() -> None:
    first, *others = (_ran(edges, True, True)[0] for edges in WHOLE)
    assert all(torch.equal(first, other) for other in others)


def test_the_gate_of_attention_is_not_that_of_an_mlp() -> None:
    names = ["projected", "gates", "attention_gate", "z", "router", "shared_gate"]
    assert [wanted.group for wanted in Wanted] == names


def test_a_norm_scaled_by_its_weight_alone_is_seen() -> None:
    assert not near(*_ran((), True, True, plain=True))
