"""Queries, keys and values agree with the op, and have the same bits for whole and split heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations, product
from typing import Any, NamedTuple

import pytest
import torch

from tests.vm.groups.desk import Desk, near, random, unknown, whole_numbers
from tpcompile.ir.ops.decode.norm_qkv import norm_qkv_rope_append
from tpcompile.vm.groups import NormQkvRopeAppend, NormQkvRows
from tpcompile.vm.groups import qkv_operands as qkv
from tpcompile.vm.groups.normed import Normed
from tpcompile.vm.groups.qkv_operands import Part, QkvOperands
from tpcompile.vm.program import Format
from tpcompile.vm.program.instruction import Range, StepInstruction, to_fp32

HIDDEN, WIDTH, LAYERS, LAYER, BLOCK, MOST, LONGEST = 10, 8, 2, 1, 2, 4, 9
EPS, HEAD_EPS = to_fp32(1e-6), to_fp32(1e-3)
LENGTHS = (5, 1, 8)
TABLES = ((7, 2, 4, -1), (0, -1, -1, -1), (3, 9, 1, 6))
SLOTS = (8, 0, 13)
"""The slot of each sequence's last token."""


@dataclass(frozen=True)
class Given:
    """A layer's projection with some heads of each kind."""

    heads: tuple[int, int, int] = (3, 2, 2)
    bias: bool = True
    norms: bool = True
    interleaved: bool = False
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = LENGTHS
    apart: bool = False
    """Whether queries, keys and values have a weight each."""
    rotated: int = WIDTH
    """The elements of a head that are rotated."""
    zero_centered: bool = False

    @cached_property
    def values(self) -> dict[str, torch.Tensor | None]:
        """Return operands by name; random, but fixed."""
        rows = sum(self.heads) * WIDTH
        return {
            "x": random(3, HIDDEN, dtype=self.dtype),
            "norm": random(HIDDEN, seed=1, dtype=self.dtype),
            "weight": random(rows, HIDDEN, seed=2, dtype=self.dtype),
            "bias": random(rows, seed=3, dtype=self.dtype) if self.bias else None,
            "q_norm": random(WIDTH, seed=4, dtype=self.dtype) if self.norms else None,
            "k_norm": random(WIDTH, seed=5, dtype=self.dtype) if self.norms else None,
            "cos": random(LONGEST, self.rotated, seed=6, dtype=self.dtype),
            "sin": random(LONGEST, self.rotated, seed=7, dtype=self.dtype),
        }

    @property
    def positions(self) -> torch.Tensor:
        return whole_numbers(*(length - 1 for length in LENGTHS))

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and cache as the op computes them."""
        values: Any = self.values
        places = self.positions.long()
        cache = unknown(LAYERS, 2, 20, self.heads[1], WIDTH, dtype=self.dtype)
        q = norm_qkv_rope_append(
            values["x"],
            values["norm"],
            EPS,
            values["weight"],
            values["bias"],
            values["q_norm"],
            values["k_norm"],
            HEAD_EPS,
            values["cos"][places],
            values["sin"][places],
            cache,
            torch.tensor(SLOTS),
            LAYER,
            BLOCK,
            self.heads,
            self.interleaved,
            self.zero_centered,
        )
        return q, cache


class Linear(NamedTuple):
    """The linear that computes a part, its first head in it, and buffers for blocks of heads."""

    weight: int
    bias: int
    first: int
    raw: int
    arrivals: int


class Work:
    """The same operands as buffers of a desk."""

    def __init__(self, inputs: Given) -> None:
        self.given, self.desk = inputs, Desk()
        put = {name: self.desk.put(tensor) for name, tensor in inputs.values.items()}
        self.q = self.desk.put(unknown(3, inputs.heads[0] * WIDTH, dtype=inputs.dtype))
        self.cache = self.desk.put(
            unknown(LAYERS, 2, 20, inputs.heads[1], WIDTH, dtype=inputs.dtype)
        )
        linears = self._linears(put)
        self.raw = {part: linear.raw for part, linear in linears.items()}
        self.arrivals = {part: linear.arrivals for part, linear in linears.items()}
        shared = {
            "normed": Normed(put["x"], put["norm"], 3, HIDDEN, EPS, inputs.zero_centered),
            "positions": self.desk.put(inputs.positions),
            "lengths": self.desk.put(whole_numbers(*inputs.lengths)),
            "tables": self.desk.put(torch.tensor(TABLES, dtype=torch.int32)),
        }
        norms = {Part.Q: put["q_norm"], Part.K: put["k_norm"], Part.V: -1}
        self.at = {
            part: QkvOperands(
                rank=0,
                layer=LAYER,
                part=part,
                weight=linear.weight,
                bias=linear.bias,
                first_row=linear.first * WIDTH,
                head_norm=norms[part],
                head_eps=HEAD_EPS,
                cos=put["cos"],
                sin=put["sin"],
                longest=LONGEST,
                rotated=inputs.rotated,
                interleaved=inputs.interleaved,
                most_blocks=MOST,
                block=BLOCK,
                width=WIDTH,
                out=self.q if part == Part.Q else self.cache,
                format=Format.of(torch.float32),
                **shared,  # type: ignore[arg-type]
            )
            for part, linear in linears.items()
        }

    def _linears(self, put: dict[str, int]) -> dict[Part, Linear]:
        """Return the linear of each part: all parts of one, or one of each."""
        inputs, parts = self.given, (Part.Q, Part.K, Part.V)
        firsts = (0, inputs.heads[0], inputs.heads[0] + inputs.heads[1])
        if not inputs.apart:
            buffers = self._joined(sum(inputs.heads))
            return {
                part: Linear(put["weight"], put["bias"], first, *buffers)
                for part, first in zip(parts, firsts, strict=True)
            }
        linears = {}
        for part, first, heads in zip(parts, firsts, inputs.heads, strict=True):
            rows = slice(first * WIDTH, (first + heads) * WIDTH)
            tensors = (inputs.values[name] for name in ("weight", "bias"))
            numbers = [self.desk.put(None if whole is None else whole[rows]) for whole in tensors]
            linears[part] = Linear(*numbers, 0, *self._joined(heads))
        return linears

    def _joined(self, heads: int) -> tuple[int, int]:
        """Return buffers for blocks of so many heads, and for their arrivals."""
        raw = self.desk.put(unknown(3, heads * WIDTH, dtype=self.given.dtype))
        return raw, self.desk.put(torch.zeros(heads, dtype=torch.int32))

    def heads(self, size: int) -> list[StepInstruction]:
        """Return instructions of `size` heads."""
        counts = dict(zip((Part.Q, Part.K, Part.V), self.given.heads, strict=True))
        return [
            NormQkvRopeAppend(self.at[part], Range(first, min(first + size, count)))
            for part, count in counts.items()
            for first in range(0, count, size)
        ]

    def rows(self, *edges: int) -> list[StepInstruction]:
        """Return instructions of head blocks cut at these edges."""
        blocks = [Range(a, b) for a, b in zip((0, *edges), (*edges, WIDTH), strict=True)]
        counts = dict(zip((Part.Q, Part.K, Part.V), self.given.heads, strict=True))
        return [
            NormQkvRows(self.at[part], self.raw[part], self.arrivals[part], head, rows, len(blocks))
            for part, count in counts.items()
            for head in range(count)
            for rows in blocks
        ]

    def ran(self, instructions: list[StepInstruction]) -> tuple[torch.Tensor, torch.Tensor]:
        self.desk.run(instructions)
        q = self.desk.tensors[self.q]
        return q.view(3, -1, WIDTH), self.desk.tensors[self.cache]


CUTS: dict[str, Callable[[Work], list[StepInstruction]]] = {
    "one head each": lambda work: work.heads(1),
    "two heads": lambda work: work.heads(2),
    "all heads": lambda work: work.heads(9),
    "halves of heads": lambda work: work.rows(4),
    "uneven blocks": lambda work: work.rows(1, 3, 6),
    "one block per head": lambda work: work.rows(),
    "blocks backwards": lambda work: work.rows(3, 5)[::-1],
}
GIVEN = [
    Given(),
    Given(bias=False),
    Given(norms=False),
    Given(interleaved=True),
    Given((5, 1, 1), norms=False, interleaved=True),
    Given((2, 2, 2), bias=False, norms=False),
    Given(apart=True),
    Given((2, 2, 2), bias=False, apart=True),
    Given(rotated=4, zero_centered=True),
    Given(rotated=6, interleaved=True),
]


def agrees(actual: tuple[torch.Tensor, torch.Tensor], inputs: Given) -> bool:
    """Return whether queries and cache agree with the op, including unwritten slots."""
    q, cache = inputs.expected()
    held = torch.equal(actual[1].isnan(), cache.isnan())
    return near(actual[0], q) and held and near(actual[1].nan_to_num(), cache.nan_to_num())


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("inputs", GIVEN, ids=str)
def test_as_the_op_whoever_has_which_rows(inputs: Given, cut: str) -> None:
    """Traps 3, 4, 5, 7, 9, 10, 11 and 22: one fused weight, KV heads only, whole heads."""
    work = Work(inputs)
    assert agrees(work.ran(CUTS[cut](work)), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_whoever_has_which_rows(dtype: torch.dtype) -> None:
    """They do not depend on whether the parts have one weight, either."""
    outputs = []
    for cut, apart in product(CUTS.values(), (False, True)):
        work = Work(Given(dtype=dtype, apart=apart))
        outputs.append(work.ran(cut(work)))
    for q, cache in outputs[1:]:
        assert torch.equal(q, outputs[0][0])
        assert torch.equal(cache.nan_to_num(), outputs[0][1].nan_to_num())


def test_a_sequence_has_the_bits_that_it_has_alone() -> None:
    inputs = Given()
    whole = Work(inputs)
    q, _ = whole.ran(whole.heads(1))
    alone = Work(inputs)
    normed = replace(alone.at[Part.Q].normed, batch=1)
    alone.desk.tensors[normed.x] = alone.desk.tensors[normed.x][1:2]
    operands = replace(alone.at[Part.Q], normed=normed, positions=alone.desk.put(whole_numbers(0)))
    alone.desk.tensors[alone.q] = unknown(1, inputs.heads[0] * WIDTH)
    alone.desk.run([NormQkvRopeAppend(operands, Range(0, 3))])
    assert torch.equal(alone.desk.tensors[alone.q].view(-1, WIDTH), q[1])


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_the_last_block_finishes_the_head_whichever_it_is(order: tuple[int, ...]) -> None:
    """The last block to arrive completes the head, also in later steps (trap 32)."""
    inputs = Given((1, 1, 1))
    work = Work(inputs)
    blocks = work.rows(3, 5)[:3]
    for step in range(2):
        work.desk.tensors[work.q].fill_(torch.nan)
        for place in order:
            assert work.desk.tensors[work.q].isnan().all(), "not before all blocks have arrived"
            work.desk.run([blocks[place]])
        assert near(work.desk.tensors[work.q].view(3, 1, WIDTH), inputs.expected()[0])
        assert work.desk.tensors[work.arrivals[Part.Q]].tolist() == [3 * (step + 1), 0, 0]


@pytest.mark.parametrize("cut", ["one head each", "halves of heads"])
def test_what_holds_nothing_is_not_kept(cut: str) -> None:
    work = Work(Given(lengths=(5, 0, 8)))
    _, cache = work.ran(CUTS[cut](work))
    _, expected = Given().expected()
    expected[:, :, SLOTS[1]] = torch.nan
    assert torch.equal(cache.isnan(), expected.isnan())
    assert near(cache.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("cut", ["two heads", "uneven blocks"])
def test_what_it_shows(cut: str) -> None:
    """Each value is reported once, at its position among all heads."""
    inputs = Given()
    work = Work(inputs)
    q, cache = work.ran(CUTS[cut](work))
    names = {name for name, *_ in work.desk.shown}
    assert names == {"norm", "q", "k", "v", "q_normed", "k_normed", "q_rotated", "k_rotated"}
    assert torch.equal(work.desk.seen("q_rotated", 3, 3 * WIDTH), q.flatten(1))
    stored = cache[LAYER, :, list(SLOTS)]
    assert torch.equal(work.desk.seen("k_rotated", 3, 2 * WIDTH), stored[0].flatten(1))
    assert torch.equal(work.desk.seen("v", 3, 2 * WIDTH), stored[1].flatten(1))
    for name in names - {"norm"}:
        columns = [c for other, _, c, _ in work.desk.shown if other == name]
        assert sum(c.extent for c in columns) == (3 if name.startswith("q") else 2) * WIDTH


@pytest.mark.parametrize("bias", [False, True])
def test_bf16_is_rounded_where_the_op_rounds(bias: bool) -> None:
    """Trap 20: the error relative to fp32 is about that of the op in bf16."""
    inputs = Given(dtype=torch.bfloat16, bias=bias)
    work = Work(inputs)
    q, _ = work.ran(work.heads(1))
    rounded, _ = inputs.expected()
    exact = Given(dtype=torch.float64, bias=bias)
    exact.__dict__["values"] = {
        name: None if value is None else value.double() for name, value in inputs.values.items()
    }
    truth, _ = exact.expected()
    error, allowed = ((side.double() - truth).abs().mean() for side in (q, rounded))
    assert error <= 1.05 * allowed


def _without(name: str) -> Callable[[Work], None]:
    def change(work: Work) -> None:
        work.at = {part: replace(operands, **{name: -1}) for part, operands in work.at.items()}

    return change


def _first_rows(firsts: tuple[int, int, int]) -> Callable[[Work], None]:
    def change(work: Work) -> None:
        for part, first in zip((Part.Q, Part.K, Part.V), firsts, strict=True):
            work.at[part] = replace(work.at[part], first_row=first * WIDTH)

    return change


def _swapped_norms(work: Work) -> None:
    q, k = work.at[Part.Q].head_norm, work.at[Part.K].head_norm
    work.at[Part.Q] = replace(work.at[Part.Q], head_norm=k)
    work.at[Part.K] = replace(work.at[Part.K], head_norm=q)


def _normed_values(work: Work) -> None:
    work.at[Part.V] = replace(work.at[Part.V], head_norm=work.at[Part.K].head_norm)


def _other_layout(work: Work) -> None:
    work.at = {
        p: replace(operands, interleaved=not operands.interleaved)
        for p, operands in work.at.items()
    }


def _transposed(work: Work) -> None:
    """Split the weight along its input, which fits if it is square."""
    weight = work.desk.tensors[work.at[Part.Q].weight]
    work.desk.tensors[work.at[Part.Q].weight] = weight.flip(1)


def _rotated_whole(work: Work) -> None:
    """Rotate whole heads, with zeros where the tables have no column."""
    for part, operands in work.at.items():
        for name in ("cos", "sin"):
            table = work.desk.tensors[getattr(operands, name)]
            wider = torch.zeros(LONGEST, WIDTH, dtype=table.dtype)
            wider[:, : table.shape[1]] = table
            operands = replace(operands, **{name: work.desk.put(wider)})
        work.at[part] = replace(operands, rotated=WIDTH)


def _plain_norms(work: Work) -> None:
    for part, operands in work.at.items():
        work.at[part] = replace(operands, normed=replace(operands.normed, zero_centered=False))


def _layer_below(work: Work) -> None:
    work.at = {part: replace(operands, layer=LAYER - 1) for part, operands in work.at.items()}


def _one_late(work: Work) -> None:
    for operands in work.at.values():
        work.desk.tensors[operands.positions] = work.given.positions + 1
        work.at = {part: replace(operands, longest=LONGEST) for part, operands in work.at.items()}


MISTAKES: dict[str, Callable[[Work], None]] = {
    "trap 2: columns of the weight in another order": _transposed,
    "trap 3: keys and values in each other's rows": _first_rows((0, 5, 3)),
    "trap 3: queries behind keys and values": _first_rows((4, 0, 2)),
    "trap 5: no bias": _without("bias"),
    "trap 5: no norms of heads": _without("head_norm"),
    "trap 10: norms of heads swapped": _swapped_norms,
    "trap 10: the other rotary layout": _other_layout,
    "trap 14: positions one late": _one_late,
    "values normalised too": _normed_values,
    "another layer of the cache": _layer_below,
    "heads rotated whole": _rotated_whole,
    "norms scaled by their weight alone": _plain_norms,
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("cut", ["one head each", "halves of heads"])
def test_a_mistake_is_seen(cut: str, mistake: str) -> None:
    partly = MISTAKES[mistake] in (_rotated_whole, _plain_norms)
    work = Work(Given(rotated=4, zero_centered=True) if partly else Given())
    MISTAKES[mistake](work)
    assert not agrees(work.ran(CUTS[cut](work)), work.given)


def test_trap_11_a_norm_over_a_block_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 11: normalising each block separately is detected."""
    work = Work(Given())
    finish = QkvOperands.finish

    def early(self: QkvOperands, memory: Any, heads: Range, rows: torch.Tensor, probe: Any) -> None:
        halves = rows.unflatten(-1, (-1, WIDTH // 2))
        weight = memory[self.head_norm].unflatten(-1, (-1, WIDTH // 2))
        normed = qkv.rms_norm(halves, weight, self.head_eps).flatten(-2)
        finish(replace(self, head_norm=-1), memory, heads, normed, probe)

    monkeypatch.setattr(
        QkvOperands,
        "finish",
        lambda self, *args: (early if self.head_norm >= 0 else finish)(self, *args),
    )
    assert not agrees(work.ran(work.rows(4)), work.given)


def test_trap_9_a_rotation_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qkv, "rope", lambda values, *tables, interleaved: values)
    work = Work(Given())
    assert not agrees(work.ran(work.heads(1)), work.given)
