"""Regions, joins and bytes of instructions follow from the rules of their operands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated, ClassVar

import pytest
import torch

from tests.vm.groups.lowered import CASES, lowered, step_program
from tpcompile.errors import UnsupportedError
from tpcompile.ir.format import Component
from tpcompile.vm.program import Box, Format, Join, Region, Role, rules
from tpcompile.vm.program.accesses import Interval
from tpcompile.vm.program.encoding import first_weights
from tpcompile.vm.program.instruction import (
    NONE,
    Range,
    StepInstruction,
    WeightInstruction,
    columns_of,
)


class Side(IntEnum):
    """An operand that other rules depend on."""

    LEFT = 0
    RIGHT = 1


@dataclass(frozen=True)
class Inner:
    """Operands with a `batch` of their own."""

    x: Annotated[int, rules.scratch("batch", "width").reads()]
    batch: Annotated[int, rules.COUNT]
    width: Annotated[int, rules.COUNT]


_SIDES = {
    Side.LEFT: rules.scratch("inner.batch", "rows").writes(":", "rows"),
    Side.RIGHT: rules.scratch("slots", "all_rows").writes("slot", "moved"),
}


@dataclass(frozen=True)
class ToyOperands:
    """Operands with every way of accessing a buffer."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    side: Side
    late: Annotated[int, rules.weight("batch").reads(turn=1)]
    inner: Inner
    batch: Annotated[int, rules.COUNT]
    bias: Annotated[int, rules.maybe(rules.weight("all_rows").reads("moved", turn=2))]
    terms: Annotated[int, rules.scratch("n", "width", each_rank=True).reads(":2*batch", "side")]
    ranks: Annotated[int, rules.RANKS]
    places: Annotated[
        int, rules.sole(Role.POSITIONS, "batch").reads(unless=("side", Side.RIGHT)).writes("slot")
    ]
    weight: Annotated[int, rules.weight("all_rows", "inner.width").reads("rows").reads("moved")]
    out: Annotated[int, rules.Chosen("side", _SIDES)]
    first: Annotated[int, rules.COUNT]
    scale: Annotated[int, rules.COUNT]
    format: Annotated[Format, rules.FormatOf("weight")]

    @property
    def half(self) -> int:
        return self.first // 2


@dataclass(frozen=True)
class Toy(WeightInstruction):
    """An instruction with a rule for each kind of access."""

    at: ToyOperands
    rows: Annotated[Range, rules.Within("all_rows")]
    slot: Annotated[int, rules.Number(0)]
    own: Annotated[int, rules.scratch("batch", "n").reads(":", "chosen")]
    name: ClassVar[str] = "toy"
    moved = Interval("first + half + rows*scale")

    @property
    def chosen(self) -> Range:
        return Range(self.slot, self.slot + 3)


def toy(side: Side = Side.LEFT, bias: int = NONE) -> Toy:
    inner = Inner(x=20, batch=4, width=8)
    operands = ToyOperands(
        rank=0,
        layer=0,
        side=side,
        late=21,
        inner=inner,
        batch=5,
        bias=bias,
        terms=30,
        ranks=2,
        places=40,
        weight=41,
        out=42,
        first=100,
        scale=2,
        format=Format.of(torch.bfloat16),
    )
    return Toy(operands, Range(3, 7), 6, 50)


MOVED = (100 + 50 + 3 * 2, 100 + 50 + 7 * 2)


def test_an_interval_is_a_range_of_the_instruction() -> None:
    assert toy().moved == Range(*MOVED)
    assert isinstance(Toy.moved, Interval)


def test_shared_regions_come_first_then_turns_then_operands() -> None:
    """Names of the inner dataclass take precedence in it: `batch` is 4 there, and 5 outside."""
    assert toy().reads == (
        Region(20, ((0, 4), (0, 8))),
        Region(30, ((0, 10), (0, 1))),
        Region(31, ((0, 10), (0, 1))),
        Region(40, ((0, 5),)),
        Region(21, ((0, 5),)),
        Region(41, ((3, 7), (0, 8))),
        Region(41, (MOVED, (0, 8))),
        Region(50, ((0, 5), (6, 9))),
    )


def test_absent_and_chosen_operands() -> None:
    """A bias that is there is read; another side reads no places and has another buffer."""
    left, right = toy(bias=60), toy(Side.RIGHT)
    assert set(left.reads) - set(toy().reads) == {Region(60, (MOVED,))}
    assert left.reads[-1] == Region(60, (MOVED,)), "by its turn"
    assert {region.buffer for region in toy().reads} - {r.buffer for r in right.reads} == {40}
    places = Region(40, ((6, 7),))
    assert left.writes == (places, Region(42, ((0, 4), (3, 7))))
    assert right.writes == (places, Region(42, ((6, 7), MOVED)))
    assert left.joins == ()


def test_instructions_in_any_order_have_their_own_regions() -> None:
    """Regions that instructions share are found again for another `at`."""
    left, right = toy(), toy(Side.RIGHT)
    other = replace(right, rows=Range(0, 1))
    wanted = [replace(instruction).reads for instruction in (left, right, other)]
    assert [replace(instruction).reads for instruction in (other, left, right)] == [
        wanted[2],
        *wanted[:2],
    ]
    assert replace(left, slot=9).reads[:5] == left.reads[:5]


def test_bytes_of_a_weight_follow_from_the_parts_that_are_read() -> None:
    """Two runs of rows, 4 and 8 long, in 8 columns of 2 bytes, for a batch of 5."""
    instruction = toy()
    assert instruction.weight_shape == (4 + 8, 8)
    assert instruction.traffic == 12 * 8 * 2
    assert instruction.work == 12 * 8 * 5
    assert instruction.values == (12 + 8) * 5


@dataclass(frozen=True)
class BlockOperands:
    """Operands of the blocks of heads."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    out: Annotated[int, rules.scratch("batch", "heads*width").joins(":", "head*width", turn=1)]
    batch: Annotated[int, rules.COUNT]
    width: Annotated[int, rules.COUNT]
    end: tuple[float, ...] = (0.5, 7)


@dataclass(frozen=True)
class Block(StepInstruction):
    """A block of a head."""

    at: BlockOperands
    counts: Annotated[int, rules.sole(Role.ARRIVALS, "heads").joins("head")]
    head: Annotated[int, rules.Number(0)]
    rows: Annotated[Range, rules.Within("width")]
    blocks: Annotated[int, rules.COUNT]
    arrival: ClassVar[rules.Arrival | None] = rules.Arrival("rows", "width", "blocks", "end")
    name: ClassVar[str] = "block"


BLOCK = Block(BlockOperands(0, 0, 8, 3, 16), 9, 2, Range(4, 8), 4)


def test_joins_are_completed_by_the_arrival() -> None:
    shared = (4, 8), 16, 4, (0.5, 7)
    assert BLOCK.joins == (
        Join(Region(9, ((2, 3),)), *shared),
        Join(Region(8, ((0, 3), (32, 48))), *shared),
    )
    assert BLOCK.reads == BLOCK.writes == ()


@dataclass(frozen=True)
class NoArrival(Block):
    """A block that joins regions, but does not say how."""

    arrival: ClassVar[rules.Arrival | None] = None
    name: ClassVar[str] = "no_arrival"


@dataclass(frozen=True)
class PlainOperands:
    """Operands of which no rule says what is accessed."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    x: Annotated[int, rules.scratch("batch", "width")]
    batch: Annotated[int, rules.COUNT]


@dataclass(frozen=True)
class Plain(StepInstruction):
    """An instruction whose rules do not say what it accesses."""

    at: PlainOperands
    columns: Annotated[Range, rules.Within("width")]
    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Unknown(Plain):
    """An instruction that reads a part that nothing names."""

    at: Annotated[PlainOperands, {"x": rules.scratch("batch", "width").reads("batsh")}]
    name: ClassVar[str] = "unknown"


@dataclass(frozen=True)
class WholeUnknown(Plain):
    """An instruction that reads a whole dimension whose extent is no operand."""

    at: Annotated[PlainOperands, {"x": rules.scratch("batch", "width").reads()}]
    name: ClassVar[str] = "whole_unknown"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Plain, "The rules of plain do not say which buffers it accesses"),
        (Unknown, "A rule of unknown has an unknown name.*batsh"),
        (WholeUnknown, "A rule of whole_unknown has an unknown name.*width"),
    ],
)
def test_rules_that_give_no_regions(kind: type[Plain], message: str) -> None:
    instruction = kind(PlainOperands(0, 0, 1, 4), Range(0, 2))
    for name in ("reads", "writes"):
        with pytest.raises(UnsupportedError, match=f"(?s){message}"):
            getattr(instruction, name)


def test_joins_without_an_arrival() -> None:
    instruction = NoArrival(BLOCK.at, 9, 2, Range(4, 8), 4)
    with pytest.raises(UnsupportedError, match="with joins and an `arrival`"):
        _ = instruction.reads


def test_a_part_with_too_many_intervals() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)scratch buffer has too many.*batch, width"):
        rules.scratch("batch", "width").reads(":", "columns", ":")


@dataclass(frozen=True)
class ByHand(Plain):
    """An instruction that states its regions itself, as those of older packages do."""

    name: ClassVar[str] = "by_hand"

    @property
    def reads(self) -> tuple[Region, ...]:  # type: ignore[override]
        return (columns_of(self.at.x, self.at.batch, self.columns),)

    @property
    def writes(self) -> tuple[Region, ...]:  # type: ignore[override]
        return ()


def test_an_instruction_may_state_its_regions_by_hand() -> None:
    instruction = ByHand(PlainOperands(0, 0, 1, 4), Range(0, 2))
    assert instruction.reads == (Region(1, ((0, 4), (0, 2))),)
    assert instruction.writes == instruction.joins == ()


def test_regions_of_gate_and_up() -> None:
    """Gate before up, and the weight before its bias, as before rules said what is read."""
    (case,) = (case for case in CASES if case.tp == 1 and case.splits == 4)
    instruction = next(i for i in lowered(case).instructions if i.name == "norm_gate_up_swiglu")
    operands, rows = instruction.at, instruction.rows  # type: ignore[attr-defined]
    up = (operands.ffn + rows.start, operands.ffn + rows.stop)
    whole = (0, operands.normed.width)

    def weights(bias: int) -> list[tuple[int, Box]]:
        regions = replace(instruction, at=replace(operands, bias=bias)).reads[2:]
        return [(region.buffer, region.box) for region in regions]

    gate = [(operands.weight, (rows, whole)), (operands.weight, (up, whole))]
    assert weights(NONE) == gate
    assert weights(7) == [gate[0], (7, (rows,)), gate[1], (7, (up,))]


def test_the_bytes_of_a_row_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format with other bytes per row changes traffic and first weights, and nothing else."""
    program = step_program(CASES[-1])
    before = first_weights(program)
    traffic = [instruction.traffic for instruction in lowered(CASES[-1]).instructions]
    monkeypatch.setattr(
        Component, "row_bytes", lambda self, start, stop: 3 * (stop - start) * self.dtype.itemsize
    )
    weighted = [isinstance(i, WeightInstruction) for i in lowered(CASES[-1]).instructions]
    grown = [instruction.traffic for instruction in lowered(CASES[-1]).instructions]
    per_instruction = zip(weighted, lowered(CASES[-1]).instructions, traffic, grown, strict=True)
    in_rows = ("embed", "partial_attention")
    assert all(
        new == (3 if w or i.name in in_rows else 1) * old for w, i, old, new in per_instruction
    )
    after = first_weights(program)
    assert (after[:, 0] == before[:, 0]).all() and (after[:, 1:] == 3 * before[:, 1:]).all()
    assert before[:, 2].sum() > 0
