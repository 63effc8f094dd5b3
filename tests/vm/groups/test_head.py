"""Logits, their maxima and the token are the same for all splits of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.vm.groups.desk import Desk, cuts, near, random, unknown, whole_numbers
from tpcompile.ir.ops.decode.norm_linear import norm_linear
from tpcompile.vm.groups import Argmax, NormLmHead
from tpcompile.vm.groups.head import ArgmaxOperands, HeadOperands
from tpcompile.vm.groups.normed import Normed
from tpcompile.vm.program import Format
from tpcompile.vm.program.instruction import Range, to_fp32

BATCH, WIDTH, VOCABULARY, EPS, STEPS = 3, 10, 17, to_fp32(1e-6), 4
STATE = ("tokens", "positions", "lengths", "finished", "stops", "clock", "history")


class Work:
    """The vocabulary on some ranks, each with its rows in several slots."""

    def __init__(
        self,
        slots: Sequence[Sequence[Range]],
        dtype: torch.dtype = torch.float32,
        biased: bool = False,
        stops: Sequence[int] = (-1, -1),
        **state: Sequence[int],
    ) -> None:
        self.x, self.norm = random(BATCH, WIDTH, dtype=dtype), random(WIDTH, seed=1, dtype=dtype)
        self.weight = random(VOCABULARY, WIDTH, seed=2, dtype=dtype)
        self.bias = random(VOCABULARY, seed=3, dtype=dtype) if biased else None
        self.slots, self.desk = slots, Desk()
        desk, ranks, count = self.desk, len(slots), len(slots[0])
        edges = [0]
        for ranges in slots:
            edges.append(edges[-1] + ranges[-1].stop)
        self.firsts = edges[:-1]
        self.logits = [desk.put(unknown(BATCH, ranges[-1].stop, dtype=dtype)) for ranges in slots]
        best = [desk.put(unknown(BATCH, count)) for _ in slots]
        ids = [desk.put(unknown(BATCH, count, dtype=torch.int32)) for _ in slots]
        normed = Normed(desk.put(self.x), desk.put(self.norm), BATCH, WIDTH, EPS)
        self.heads = [
            HeadOperands(
                rank=rank,
                layer=-1,
                normed=normed,
                weight=desk.put(self.weight[first:last]),
                bias=desk.put(None if self.bias is None else self.bias[first:last]),
                logits=self.logits[rank],
                best=best[rank],
                ids=ids[rank],
                first=first,
                format=Format.of(torch.float32),
            )
            for rank, (first, last) in enumerate(pairwise(edges))
        ]
        tensors: dict[str, torch.Tensor] = {
            "tokens": whole_numbers(*state.get("tokens", (90, 91, 92))),
            "positions": whole_numbers(*state.get("positions", (4, 0, 7))),
            "lengths": whole_numbers(*state.get("lengths", (5, 1, 8))),
            "finished": whole_numbers(*state.get("finished", (0, 0, 0))),
            "stops": whole_numbers(*stops),
            "clock": whole_numbers(*state.get("clock", (0,))),
            "history": unknown(STEPS, BATCH, dtype=torch.int32),
        }
        numbers = {name: desk.put(tensors[name]) for name in STATE}
        self.at = ArgmaxOperands(
            rank=0,
            layer=-1,
            best=best[0],
            ids=ids[0],
            ranks=ranks,
            slots=count,
            batch=BATCH,
            most_stops=len(stops),
            steps=STEPS,
            **numbers,
        )

    def ran(self) -> torch.Tensor:
        """Return the logits of all ranks, concatenated."""
        for operands, ranges in zip(self.heads, self.slots, strict=True):
            self.desk.run([NormLmHead(operands, rows, slot) for slot, rows in enumerate(ranges)])
        self.desk.run([Argmax(self.at)])
        return torch.cat([self.desk.tensors[number] for number in self.logits], 1)

    def state(self, name: str) -> Any:
        return self.desk.tensors[getattr(self.at, name)].tolist()


WHOLE = [[Range(0, VOCABULARY)]]
SHARES = {
    "one": WHOLE,
    "slots": [cuts(VOCABULARY, 4, 8)],
    "one row each": [cuts(VOCABULARY, *range(1, VOCABULARY))],
    "two ranks": [cuts(9, 4), cuts(8, 4)],
    "three ranks": [cuts(6, 2), cuts(6, 3), cuts(5, 4)],
}
SHARED = pytest.mark.parametrize("share", SHARES)
BIAS = pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])


@SHARED
@BIAS
def test_as_the_op(share: str, biased: bool) -> None:
    work = Work(SHARES[share], biased=biased)
    logits = work.ran()
    expected = norm_linear(work.x, work.norm, EPS, work.weight, work.bias)
    assert near(logits, expected)
    assert work.state("tokens") == expected.argmax(-1).tolist()


@SHARED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_for_any_rows_and_ranks(share: str, dtype: torch.dtype) -> None:
    whole, work = Work(WHOLE, dtype, biased=True), Work(SHARES[share], dtype, biased=True)
    assert torch.equal(work.ran(), whole.ran())
    assert work.state("tokens") == whole.state("tokens")


@BIAS
def test_bf16_is_no_further_from_fp32_than_the_op(biased: bool) -> None:
    work = Work(WHOLE, torch.bfloat16, biased)
    operands = [work.x, work.norm, work.weight, work.bias]
    x, norm, weight, bias = (None if tensor is None else tensor.double() for tensor in operands)
    assert x is not None and norm is not None and weight is not None
    truth = norm_linear(x, norm, EPS, weight, bias)
    rounded = norm_linear(work.x, work.norm, EPS, work.weight, work.bias)
    error, allowed = ((logits.double() - truth).abs().mean() for logits in (work.ran(), rounded))
    assert error <= 1.05 * allowed


@SHARED
def test_trap_16_of_equal_logits_the_lowest_token(share: str) -> None:
    work = Work(SHARES[share])
    for number in {operands.weight for operands in work.heads}:
        work.desk.tensors[number].zero_()
    work.ran()
    assert work.state("tokens") == [0, 0, 0]


@SHARED
def test_trap_16_the_lowest_of_two(share: str) -> None:
    """Ties go to the lowest id, wherever both rows are."""
    for low, high in ((3, 16), (4, 5), (8, 9), (1, 2)):
        work = Work(SHARES[share])
        for operands in work.heads:
            rows = work.desk.tensors[operands.weight]
            for place in range(len(rows)):
                rows[place] = 9 * work.x[0] if place + operands.first in (low, high) else -work.x[0]
        work.desk.tensors[work.heads[0].normed.weight].fill_(1)
        work.ran()
        assert work.state("tokens")[0] == low


def test_the_state_of_the_next_step() -> None:
    work = Work(WHOLE, clock=(2,))
    work.ran()
    tokens = work.state("tokens")
    assert work.state("positions") == [5, 1, 8]
    assert work.state("lengths") == [6, 2, 9]
    assert work.state("finished") == [0, 0, 0]
    assert work.state("clock") == [3]
    assert work.state("history")[2] == tokens
    assert work.state("history")[3] == [-7, -7, -7]


def test_a_sequence_ends_with_any_of_the_stops() -> None:
    free = Work(WHOLE)
    free.ran()
    first, second, third = free.state("tokens")
    assert first != second
    work = Work(WHOLE, stops=(-1, second))
    work.ran()
    ended = [token == second for token in (first, second, third)]
    assert work.state("finished") == [int(flag) for flag in ended]
    assert work.state("history")[0] == [first, second, third], "the history includes the stop"
    assert work.state("tokens")[1] == 91
    assert work.state("lengths")[1] == 1
    assert work.state("lengths")[0] == 6


@pytest.mark.parametrize("state", [{"finished": (0, 1, 0)}, {"lengths": (5, 0, 8)}], ids=str)
def test_what_has_ended_or_holds_nothing_stays(state: dict[str, Any]) -> None:
    work = Work(WHOLE, stops=tuple(range(VOCABULARY)) if "finished" in state else (-1,), **state)
    work.ran()
    assert work.state("tokens")[1] == 91
    assert work.state("positions")[1] == 0
    assert work.state("history")[0][1] == -1
    assert work.state("history")[0][0] >= 0
    assert work.state("finished")[1] == state.get("finished", (0, 0))[1]


def test_what_it_shows() -> None:
    work = Work(SHARES["two ranks"])
    logits = work.ran()
    assert {name for name, *_ in work.desk.shown} == {"final_norm", "logits", "token"}
    last = work.desk.shown[-1]
    assert last[0] == "token"
    assert last[3][:, 0].tolist() == logits.argmax(-1).tolist()


def test_trap_15_another_norm_than_the_last() -> None:
    work = Work(WHOLE)
    operands = work.heads[0]
    work.heads[0] = replace(operands, normed=replace(operands.normed, eps=to_fp32(0.5)))
    assert not near(work.ran(), norm_linear(work.x, work.norm, EPS, work.weight))


def test_a_rank_whose_first_row_is_forgotten() -> None:
    right, work = Work(SHARES["two ranks"]), Work(SHARES["two ranks"])
    work.heads[1] = replace(work.heads[1], first=0)
    right.ran()
    work.ran()
    assert max(right.state("tokens")) >= 9
    assert work.state("tokens") != right.state("tokens")
