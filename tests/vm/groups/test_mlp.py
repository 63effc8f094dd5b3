"""Gate and up agree with the op for any split of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.vm.groups.desk import Desk, cuts, near, random, unknown
from tpcompile.ir.ops import NORM_MLPS, NORM_MLPS_APART, Activation
from tpcompile.vm.groups import NormGate, NormGatedUp, NormGateUpSwiglu, NormUpActivation
from tpcompile.vm.groups.mlp import GatedUpOperands, GateOperands, GateUpOperands, UpOperands
from tpcompile.vm.groups.normed import Normed
from tpcompile.vm.program import Format
from tpcompile.vm.program.instruction import Range, to_fp32

BATCH, WIDTH, FFN, EPS = 3, 10, 13, to_fp32(1e-5)


SWIGLU = (Activation.SILU, True)
FORMS = pytest.mark.parametrize("form", NORM_MLPS, ids=str)


class Work:
    """A gate and up projection, or up alone, whose width no block size divides."""

    def __init__(
        self,
        biased: bool = False,
        dtype: torch.dtype = torch.float32,
        form: tuple[Activation, bool] = SWIGLU,
    ) -> None:
        self.form, sides = form, 1 + form[1]
        self.x, self.norm = random(BATCH, WIDTH, dtype=dtype), random(WIDTH, seed=1, dtype=dtype)
        self.weight = random(sides * FFN, WIDTH, seed=2, dtype=dtype)
        self.bias = random(sides * FFN, seed=3, dtype=dtype) if biased else None
        desk = self.desk = Desk()
        normed = Normed(desk.put(self.x), desk.put(self.norm), BATCH, WIDTH, EPS)
        weight, bias = desk.put(self.weight), desk.put(self.bias)
        out = desk.put(unknown(BATCH, FFN, dtype=dtype))
        shared = (0, 0, normed, weight, bias, out, FFN, Format.of(dtype))
        self.at = GateUpOperands(*shared) if form == SWIGLU else UpOperands(*shared, sides, form[0])

    def ran(self, rows: Sequence[Range] = ()) -> torch.Tensor:
        kind = NormGateUpSwiglu if self.form == SWIGLU else NormUpActivation
        self.desk.run([kind(self.at, part) for part in rows or [Range(0, FFN)]])
        output = self.desk.tensors[self.at.out]
        reported = self.desk.seen(kind.result, BATCH, FFN).to(output.dtype)
        assert torch.equal(reported.nan_to_num(), output.nan_to_num())
        return output

    def expected(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        x, norm, weight = (tensor.to(dtype) for tensor in (self.x, self.norm, self.weight))
        output: torch.Tensor = NORM_MLPS[self.form](x, norm, EPS, weight, bias)
        return output


BIAS = pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])


@FORMS
@BIAS
def test_as_the_op(biased: bool, form: tuple[Activation, bool]) -> None:
    work = Work(biased, form=form)
    assert near(work.ran(), work.expected())


@FORMS
@BIAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edges", [(4, 8, 12), (1,), tuple(range(1, FFN))], ids=str)
def test_the_same_bits_for_any_rows(
    edges: tuple[int, ...], dtype: torch.dtype, biased: bool, form: tuple[Activation, bool]
) -> None:
    """Traps 21 and 23: the last block has the remaining rows."""
    work, whole = (Work(biased, dtype, form) for _ in range(2))
    assert torch.equal(work.ran(cuts(FFN, *edges)), whole.ran())


@FORMS
@BIAS
def test_bf16_is_no_further_from_fp32_than_the_op(
    biased: bool, form: tuple[Activation, bool]
) -> None:
    work = Work(biased, torch.bfloat16, form)
    truth = work.expected(torch.float64)
    error, allowed = (
        (output.double() - truth).abs().mean() for output in (work.ran(), work.expected())
    )
    assert error <= 1.05 * allowed


def test_what_it_shows() -> None:
    work = Work()
    work.ran(cuts(FFN, 5))
    assert {name for name, *_ in work.desk.shown} == {"mlp_norm", "swiglu"}
    normed = random(BATCH, WIDTH)
    normed = normed / (normed.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * random(WIDTH, seed=1)
    assert near(work.desk.seen("mlp_norm", BATCH, WIDTH), normed)


@pytest.mark.parametrize("form", [form for form in NORM_MLPS if form[1]], ids=str)
def test_trap_3_gate_and_up_one_for_the_other(form: tuple[Activation, bool]) -> None:
    work = Work(form=form)
    expected = work.expected()
    work.desk.tensors[work.at.weight] = torch.cat(work.weight.chunk(2)[::-1])
    assert not near(work.ran(), expected)


@pytest.mark.parametrize("form", [form for form in NORM_MLPS if form != SWIGLU], ids=str)
def test_the_activation_is_an_operand(form: tuple[Activation, bool]) -> None:
    """Any other activation gives other values, for example tanh GELU in place of exact GELU."""
    work = Work(form=form)
    for other in set(Activation) - {form[0]}:
        work.at = replace(work.at, activation=other)
        actual, expected = work.ran(), work.expected()
        assert (actual - expected).abs().max() > 1e-4 * expected.abs().max()


def test_without_a_gate_the_weight_has_only_the_rows_of_up() -> None:
    with_gate, without = (Work(form=(Activation.GELU, gated)) for gated in (True, False))
    for work, rows in ((with_gate, 2 * FFN), (without, FFN)):
        instruction = NormUpActivation(work.at, Range(0, FFN))
        assert instruction.weight_shape == (rows, WIDTH)
        assert instruction.traffic == rows * WIDTH * 4


def test_trap_21_a_block_that_is_floored_away() -> None:
    work = Work()
    output = work.ran([Range(4 * n, 4 * n + 4) for n in range(FFN // 4)])
    assert output[:, 12:].isnan().all()
    assert not output[:, :12].isnan().any()


def test_a_norm_that_is_left_out() -> None:
    work = Work()
    ones = work.desk.put(torch.ones(WIDTH))
    work.at = replace(work.at, normed=replace(work.at.normed, weight=ones))
    assert not near(work.ran(), work.expected())


def test_trap_23_eps_is_an_operand() -> None:
    work = Work()
    work.at = replace(work.at, normed=replace(work.at.normed, eps=to_fp32(0.1)))
    assert not near(work.ran(), work.expected())


class Apart:
    """A gate and an up projection with a weight each."""

    def __init__(self, activation: Activation, biased: bool, dtype: torch.dtype) -> None:
        self.activation, desk = activation, Desk()
        self.desk, self.dtype = desk, dtype
        self.x, self.norm = random(BATCH, WIDTH, dtype=dtype), random(WIDTH, seed=1, dtype=dtype)
        whole = random(2 * FFN, WIDTH, seed=2, dtype=dtype)
        self.weights = whole.chunk(2)
        self.biases = random(2 * FFN, seed=3, dtype=dtype).chunk(2) if biased else (None, None)
        normed = Normed(desk.put(self.x), desk.put(self.norm), BATCH, WIDTH, EPS)
        gate, out = (desk.put(unknown(BATCH, FFN, dtype=dtype)) for _ in range(2))
        sides = [
            (0, 0, normed, desk.put(weight), desk.put(bias), stored, FFN, Format.of(dtype))
            for weight, bias, stored in zip(self.weights, self.biases, (gate, out), strict=True)
        ]
        self.gate, self.up = GateOperands(*sides[0]), GatedUpOperands(*sides[1], gate, activation)

    def ran(self, rows: Sequence[Range]) -> torch.Tensor:
        self.desk.run([NormGate(self.gate, part) for part in rows])
        self.desk.run([NormGatedUp(self.up, part) for part in rows])
        for name, number in (("gate", self.gate.out), ("activated", self.up.out)):
            reported = self.desk.seen(name, BATCH, FFN).to(self.dtype)
            assert torch.equal(reported, self.desk.tensors[number])
        return self.desk.tensors[self.up.out]


@pytest.mark.parametrize("activation", Activation)
@BIAS
def test_apart_as_the_op(biased: bool, activation: Activation) -> None:
    work = Apart(activation, biased, torch.float32)
    expected = NORM_MLPS_APART[activation](work.x, work.norm, EPS, *work.weights, *work.biases)
    assert near(work.ran([Range(0, FFN)]), expected)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_apart_the_bits_are_those_of_one_weight(dtype: torch.dtype, activation: Activation) -> None:
    """For silu they may differ by the rounding of exponentials, which `swiglu` computes itself."""
    work, whole = Apart(activation, True, dtype), Work(True, dtype, (activation, True))
    actual, expected = work.ran(cuts(FFN, 4, 8, 12)), whole.ran()
    if activation is Activation.SILU:
        assert near(actual, expected, 2e-6 if dtype == torch.float32 else 2e-2)
    else:
        assert torch.equal(actual, expected)


def test_trap_3_apart_too() -> None:
    work = Apart(Activation.SILU, False, torch.float32)
    expected = NORM_MLPS_APART[Activation.SILU](work.x, work.norm, EPS, *work.weights)
    gate, up = work.gate.weight, work.up.weight
    work.gate, work.up = replace(work.gate, weight=up), replace(work.up, weight=gate)
    assert not near(work.ran([Range(0, FFN)]), expected)
