"""Gate and up agree with the op for any split of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.vm.groups.desk import Desk, cuts, near, random, unknown
from tpcompile.ir.ops.decode.norm_linear import norm_gate_up_swiglu
from tpcompile.vm.groups import NormGateUpSwiglu
from tpcompile.vm.groups.mlp import GateUpOperands
from tpcompile.vm.groups.normed import Normed
from tpcompile.vm.program.instruction import Range, to_fp32

BATCH, WIDTH, FFN, EPS = 3, 10, 13, to_fp32(1e-5)


class Work:
    """A gate and up projection whose width no block size divides."""

    def __init__(self, biased: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self.x, self.norm = random(BATCH, WIDTH, dtype=dtype), random(WIDTH, seed=1, dtype=dtype)
        self.weight = random(2 * FFN, WIDTH, seed=2, dtype=dtype)
        self.bias = random(2 * FFN, seed=3, dtype=dtype) if biased else None
        desk = self.desk = Desk()
        normed = Normed(desk.put(self.x), desk.put(self.norm), BATCH, WIDTH, EPS)
        weight, bias = desk.put(self.weight), desk.put(self.bias)
        out = desk.put(unknown(BATCH, FFN, dtype=dtype))
        self.at = GateUpOperands(0, 0, normed, weight, bias, out, FFN, 4)

    def ran(self, rows: Sequence[Range] = ()) -> torch.Tensor:
        self.desk.run([NormGateUpSwiglu(self.at, part) for part in rows or [Range(0, FFN)]])
        found = self.desk.tensors[self.at.out]
        seen = self.desk.seen("swiglu", BATCH, FFN).to(found.dtype)
        assert torch.equal(seen.nan_to_num(), found.nan_to_num())
        return found

    def expected(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        x, norm, weight = (one.to(dtype) for one in (self.x, self.norm, self.weight))
        return norm_gate_up_swiglu(x, norm, EPS, weight, bias)


BIAS = pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])


@BIAS
def test_as_the_op(biased: bool) -> None:
    work = Work(biased)
    assert near(work.ran(), work.expected())


@BIAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edges", [(4, 8, 12), (1,), tuple(range(1, FFN))], ids=str)
def test_the_same_bits_for_any_rows(
    edges: tuple[int, ...], dtype: torch.dtype, biased: bool
) -> None:
    """Traps 21 and 23: the last block has the remaining rows."""
    assert torch.equal(Work(biased, dtype).ran(cuts(FFN, *edges)), Work(biased, dtype).ran())


@BIAS
def test_bf16_is_no_further_from_fp32_than_the_op(biased: bool) -> None:
    work = Work(biased, torch.bfloat16)
    truth = work.expected(torch.float64)
    error, allowed = ((one.double() - truth).abs().mean() for one in (work.ran(), work.expected()))
    assert error <= 1.05 * allowed


def test_what_it_shows() -> None:
    work = Work()
    work.ran(cuts(FFN, 5))
    assert {name for name, *_ in work.desk.shown} == {"mlp_norm", "swiglu"}
    normed = random(BATCH, WIDTH)
    normed = normed / (normed.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * random(WIDTH, seed=1)
    assert near(work.desk.seen("mlp_norm", BATCH, WIDTH), normed)


def test_trap_3_gate_and_up_one_for_the_other() -> None:
    work = Work()
    expected = work.expected()
    work.desk.tensors[work.at.weight] = torch.cat(work.weight.chunk(2)[::-1])
    assert not near(work.ran(), expected)


def test_trap_21_a_block_that_is_floored_away() -> None:
    work = Work()
    found = work.ran([Range(4 * n, 4 * n + 4) for n in range(FFN // 4)])
    assert found[:, 12:].isnan().all()
    assert not found[:, :12].isnan().any()


def test_a_norm_that_is_left_out() -> None:
    work = Work()
    ones = work.desk.put(torch.ones(WIDTH))
    work.at = replace(work.at, normed=replace(work.at.normed, weight=ones))
    assert not near(work.ran(), work.expected())


def test_trap_23_eps_is_an_operand() -> None:
    work = Work()
    work.at = replace(work.at, normed=replace(work.at.normed, eps=to_fp32(0.1)))
    assert not near(work.ran(), work.expected())
