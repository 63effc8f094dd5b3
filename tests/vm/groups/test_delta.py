"""Steps of linear attention agree with the op, for new sequences and for those with a past."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch

from tests.vm.groups.desk import Desk, near, random, unknown, whole_numbers
from tpcompile.ir.ops import (
    DELTA_DECAY,
    DELTA_STEP,
    DELTA_STEP_APART,
    RESUMED_CONV,
    RESUMED_DELTA_RULE,
)
from tpcompile.vm.groups import DeltaStep
from tpcompile.vm.groups.delta import DeltaOperands
from tpcompile.vm.program.instruction import Range, to_fp32

BATCH, LAYERS, LAYER, HELD, TAPS, KEY, VALUE = 3, 2, 1, 7, 4, 6, 5
EPS = to_fp32(1e-6)
LENGTHS, READ, WRITE = (1, 4, 2), (0, 3, 5), (6, 1, 2)
EVEN, UNEVEN = (0, 0, 1, 1), (0, 1, 1, 1, 2)
"""The key head of each value head: as many for each, and as of a rank with a part of the heads."""


class Work:
    """A layer of linear attention, as operands of the op and as buffers of a desk."""

    def __init__(
        self,
        readers: tuple[int, ...] = EVEN,
        biased: bool = False,
        dtype: torch.dtype = torch.float32,
        apart: bool = False,
    ) -> None:
        self.readers, self.apart = readers, apart
        v_heads, k_heads = len(readers), readers[-1] + 1
        channels = 2 * k_heads * KEY + v_heads * VALUE
        self.values: dict[str, torch.Tensor | None] = {
            "projected": random(BATCH, channels + (not apart) * v_heads * VALUE, dtype=dtype),
            **({"z": random(BATCH, v_heads * VALUE, seed=9, dtype=dtype)} if apart else {}),
            "gates": random(BATCH, 2 * v_heads, seed=1, dtype=dtype),
            "weight": random(channels, 1, TAPS, seed=2, dtype=dtype),
            "bias": random(channels, seed=3, dtype=dtype) if biased else None,
            "tails": random(LAYERS, HELD, TAPS - 1, channels, seed=4, dtype=dtype),
            "rate": random(v_heads, seed=5, dtype=dtype) - 1,
            "offset": random(v_heads, seed=6, dtype=dtype),
            "states": random(LAYERS, HELD, v_heads, KEY, VALUE, seed=7),
            "norm": random(VALUE, seed=8, dtype=dtype),
        }
        desk = self.desk = Desk()
        tensors = {
            name: None if value is None else value.clone() for name, value in self.values.items()
        }
        numbers = {name: desk.put(tensor) for name, tensor in tensors.items()}
        numbers.setdefault("z", numbers["projected"])
        self.out = desk.put(unknown(BATCH, v_heads * VALUE, dtype=dtype))
        self.at = DeltaOperands(
            rank=0,
            layer=LAYER,
            eps=EPS,
            lengths=desk.put(whole_numbers(*LENGTHS)),
            clock=desk.put(whole_numbers(0)),
            read=desk.put(whole_numbers(*READ)),
            write=desk.put(whole_numbers(*WRITE)),
            out=self.out,
            batch=BATCH,
            sequence_rows=1,
            k_heads=k_heads,
            v_heads=v_heads,
            key=KEY,
            value=VALUE,
            taps=TAPS,
            kept=TAPS - 1,
            first_k=k_heads * KEY,
            first_v=2 * k_heads * KEY,
            first_z=0 if apart else channels,
            channels=channels,
            **numbers,
        )

    def instructions(self) -> list[DeltaStep]:
        instructions, first = [], 0
        for k_head, run in groupby(self.readers):
            heads = Range(first, first := first + len(list(run)))
            instructions += [DeltaStep(self.at, row, k_head, heads) for row in range(BATCH)]
        return instructions

    def ran(self) -> list[torch.Tensor]:
        """Run the instructions in any order; return the results, the tails and the states."""
        self.desk.run(self.instructions()[::-1])
        stored = [self.desk.tensors[number] for number in (self.out, self.at.tails, self.at.states)]
        mixed = self.desk.seen("mixed", BATCH, stored[0].shape[1]).to(stored[0].dtype)
        assert torch.equal(mixed, stored[0])
        return stored

    def expected(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        operands = {
            name: tensor if tensor is None else tensor.to(dtype or tensor.dtype, copy=True)
            for name, tensor in self.values.items()
        }
        result = (DELTA_STEP_APART if self.apart else DELTA_STEP)(
            **operands,
            eps=EPS,
            starts=torch.arange(BATCH + 1),
            lengths=torch.tensor(LENGTHS),
            read=torch.tensor(READ),
            write=torch.tensor(WRITE),
            layer=LAYER,
            k_heads=list(self.readers),
        )
        tails, states = operands["tails"], operands["states"]
        assert tails is not None and states is not None
        return [result, tails, states]

    def agrees(self) -> bool:
        return all(map(near, self.ran(), self.expected()))


@pytest.mark.parametrize("apart", [False, True], ids=["fused", "apart"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("readers", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_as_the_op(readers: tuple[int, ...], biased: bool, apart: bool) -> None:
    """Nothing else changes: neither the states that are read nor those of another layer."""
    work = Work(readers, biased, apart=apart)
    assert work.agrees()
    for name, held in (("tails", work.at.tails), ("states", work.at.states)):
        old, new = work.values[name], work.desk.tensors[held]
        assert old is not None
        written = torch.zeros(LAYERS, HELD, dtype=torch.bool)
        written[LAYER, list(WRITE)] = True
        assert torch.equal(old[~written], new[~written])


@pytest.mark.parametrize("readers", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_values_on_the_way(readers: tuple[int, ...]) -> None:
    """Values that are not stored are those of the ops, at the columns of their heads."""
    work = Work(readers)
    work.ran()
    operands: dict[str, Any] = {
        name: tensor for name, tensor in work.values.items() if tensor is not None
    }
    v_heads, channels = len(readers), work.at.channels
    numbers = [torch.tensor(values) for values in (LENGTHS, READ, WRITE)]
    starts = torch.arange(BATCH + 1)
    tails, states = operands["tails"].clone(), operands["states"].clone()
    x = operands["projected"][:, :channels].contiguous()
    conv = RESUMED_CONV(x, operands["weight"], None, tails, starts, *numbers, LAYER)
    share, a = operands["gates"].split(v_heads, 1)
    keys = channels - v_heads * VALUE
    parts = conv.split([keys // 2, keys // 2, v_heads * VALUE], 1)
    decay, beta = DELTA_DECAY(a, operands["rate"], operands["offset"]), share.sigmoid()
    widths = (KEY, KEY, VALUE)
    q, k, v = (part.unflatten(1, (-1, width)) for part, width in zip(parts, widths, strict=True))
    mixed = RESUMED_DELTA_RULE(q, k, v, decay, beta, states, starts, *numbers, LAYER, list(readers))
    names = ("q_conv", "k_conv", "v_conv", "decay", "beta", "delta_rule")
    for name, wanted in zip(names, (*parts, decay, beta, mixed.flatten(1)), strict=True):
        assert near(work.desk.seen(name, *wanted.shape), wanted), name


def test_later_steps_of_a_launch_read_what_the_step_before_has_written() -> None:
    work = Work()
    work.ran()
    once = work.desk.tensors[work.at.states].clone()
    work.desk.tensors[work.at.clock] += 1
    work.desk.tensors[work.at.lengths] += 1
    work.desk.tensors[work.at.read].fill_(-1)
    work.ran()
    other = Work()
    states = other.desk.tensors[other.at.states]
    states[LAYER, list(READ)] = once[LAYER, list(WRITE)]
    other.desk.tensors[other.at.lengths] += 1
    tails = other.desk.tensors[other.at.tails]
    first = Work()
    first.ran()
    tails[LAYER, list(READ)] = first.desk.tensors[first.at.tails][LAYER, list(WRITE)]
    assert torch.equal(other.ran()[0], work.desk.tensors[work.out])


def test_rows_without_a_sequence_change_nothing() -> None:
    work = Work()
    work.desk.tensors[work.at.lengths][1] = 0
    before = work.desk.tensors[work.at.states].clone()
    work.desk.run(work.instructions())
    assert work.desk.tensors[work.out][1].isnan().all()
    assert torch.equal(before[:, WRITE[1]], work.desk.tensors[work.at.states][:, WRITE[1]])


def test_bf16_is_rounded_where_the_op_rounds() -> None:
    """The error relative to fp64 is about that of the op in bf16; states stay in fp32."""
    work = Work(UNEVEN, biased=True, dtype=torch.bfloat16)
    truth = work.expected(torch.float64)
    for actual, rounded, exact in zip(work.ran(), work.expected(), truth, strict=True):
        assert actual.dtype == rounded.dtype
        error, allowed = ((side.double() - exact).abs().mean() for side in (actual, rounded))
        assert error <= 1.1 * allowed


MISTAKES: dict[str, Callable[[DeltaOperands], DeltaOperands]] = {
    "no bias": lambda operands: replace(operands, bias=-1),
    "another layer's states": lambda operands: replace(operands, layer=LAYER - 1),
    "keys in the place of queries": lambda operands: replace(operands, first_k=0),
    "values in the place of keys": lambda operands: replace(operands, first_v=operands.first_k),
    "the state that is written is read": lambda operands: replace(operands, read=operands.write),
    "the rates of the offsets": lambda operands: replace(operands, rate=operands.offset),
    "gates from the first channel": lambda operands: replace(operands, first_z=0),
    "a tap late": lambda operands: replace(operands, taps=TAPS - 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    work = Work(biased=True)
    work.at = MISTAKES[mistake](work.at)
    assert not work.agrees()
