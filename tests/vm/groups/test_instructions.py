"""Each instruction has a name, an opcode, operands, regions, a cost and an encoding."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vm.groups.lowered import CASES, lowered
from tests.vm.groups.operands import instructions
from tpcompile.errors import UsageError
from tpcompile.ir.format import Format
from tpcompile.vm.groups import AllReduce
from tpcompile.vm.program.buffer import LINEAR_STATES
from tpcompile.vm.program.fields import field_types, rules_of
from tpcompile.vm.program.instruction import Range, StepInstruction, to_fp32, word_count
from tpcompile.vm.program.instruction_set import INSTRUCTIONS, decode, encode
from tpcompile.vm.program.region import refusal
from tpcompile.vm.program.rules import BufferRule, Chosen
from tpcompile.vm.targets import TARGETS

KINDS = pytest.mark.parametrize("kind", INSTRUCTIONS.values(), ids=lambda kind: kind.name)


@lru_cache
def made(kind: type[StepInstruction]) -> list[tuple[Any, StepInstruction]]:
    """Return the lowered instructions of this kind, each with its program's buffers."""
    pairs = [
        (low.buffers, i) for case in CASES for low in [lowered(case)] for i in low.instructions
    ]
    return [(buffers, instruction) for buffers, instruction in pairs if type(instruction) is kind]


def lacks(kind: type[StepInstruction]) -> list[str]:
    """Return what an instruction class lacks."""
    missing = [
        name for name in ("traffic", "run") if getattr(kind, name) is getattr(StepInstruction, name)
    ]
    accesses = how_accessed(kind)
    missing += [] if "reads" in accesses else ["reads"]
    missing += [] if accesses & {"writes", "joins"} else ["writes"]
    if not re.fullmatch("[a-z]+(_[a-z]+)*", getattr(kind, "name", "")):
        missing.append("name")
    if kind not in INSTRUCTIONS.values():
        missing.append("opcode")
    if not (kind.__doc__ or "").partition("\n")[0].endswith(".") or "(at:" in (kind.__doc__ or ""):
        missing.append("docstring")
    if "at" not in vars(kind).get("__annotations__", {}) or not is_dataclass(operands_of(kind)):
        missing.append("operands")
    elif not {"rank", "layer"} <= {field.name for field in fields(operands_of(kind))}:
        missing.append("rank and layer")
    if kind.__hash__ is None or not vars(kind).get("__dataclass_params__", _NONE).frozen:
        missing.append("frozen dataclass")
    return missing


def how_accessed(kind: type[StepInstruction]) -> set[str]:
    """Return the accesses in the rules of its operands: `reads`, `writes` and `joins`."""
    if not is_dataclass(operands_of(kind)):
        return set()
    named = [rule for *_, rule in rules_of(kind)]
    expanded = [
        r for rule in named for r in (rule.rules.values() if isinstance(rule, Chosen) else [rule])
    ]
    return {
        access.mode for rule in expanded if isinstance(rule, BufferRule) for access in rule.accesses
    }


@dataclass
class _None:
    frozen: bool = False


_NONE = _None()


def operands_of(kind: Any) -> Any:
    return dict(field_types(kind))["at"]


@KINDS
def test_it_has_all_of_it(kind: type[StepInstruction]) -> None:
    assert lacks(kind) == []


def test_what_is_lacking_is_seen() -> None:
    class Idle(StepInstruction):
        pass

    expected = {"reads", "writes", "traffic", "run", "name", "opcode", "docstring", "operands"}
    assert set(lacks(Idle)) >= expected | {"frozen dataclass"}


def test_opcodes_and_names_are_its_own() -> None:
    assert [kind.opcode for kind in INSTRUCTIONS.values()] == list(range(1, len(INSTRUCTIONS) + 1))
    for name, kind in INSTRUCTIONS.items():
        assert kind.name == name and INSTRUCTIONS.by_opcode[kind.opcode] is kind


@pytest.mark.parametrize(
    ("number", "message"),
    [(1, "embed with the same opcode"), (0, "an opcode above 0"), (-1, "an opcode above 0")],
)
def test_an_opcode_is_taken_once(number: int, message: str) -> None:
    class Other(StepInstruction):
        name: ClassVar[str] = "other"
        opcode: ClassVar[int] = number

    with pytest.raises(UsageError, match=message):
        INSTRUCTIONS.add("other", Other)
    assert "other" not in INSTRUCTIONS


@KINDS
def test_lowering_makes_it_and_what_it_touches_is_there(kind: type[StepInstruction]) -> None:
    assert made(kind), "no case has this kind"
    for buffers, instruction in made(kind):
        assert instruction.writes or instruction.joins
        joined = [join.region for join in instruction.joins]
        for region in (*instruction.reads, *instruction.writes, *joined):
            buffer = buffers[region.buffer]
            assert not refusal(region.box, buffer.shape), (instruction.label, buffer.name)
        for region in (*instruction.writes, *joined):
            assert buffers[region.buffer].rank == instruction.rank, "writes must be rank-local"
            assert buffers[region.buffer].role.kind not in ("weight", "input")


@KINDS
def test_trap_27_what_others_may_still_read_is_not_written_over(
    kind: type[StepInstruction],
) -> None:
    """The residual is double-buffered, so that norms never read a new residual too early.

    Only the state of the sequences changes in place, after all other instructions, and so do the
    rows gathered by the blocks of a head, and the states of linear attention, of which each has one
    reader: the instruction that writes it.
    """
    for buffers, instruction in made(kind):
        read = {region.buffer for region in instruction.reads}
        for region in instruction.writes:
            role = buffers[region.buffer].role
            in_place = role.kind == "state" or role in LINEAR_STATES
            assert in_place or region.buffer not in read


@KINDS
def test_its_parts_can_be_told_apart_in_messages(kind: type[StepInstruction]) -> None:
    buffers, _ = made(kind)[0]
    same = [instruction for other, instruction in made(kind) if other is buffers]
    text = [instruction.label for instruction in same]
    assert all(label.startswith(f"{kind.name} ") for label in text)
    whole = {
        (
            instruction.label,
            getattr(instruction.at, "part", None),
            getattr(instruction.at, "site", None),
        )
        for instruction in same
    }
    assert len(whole) == len(same)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@KINDS
def test_it_costs_something_on_every_target(kind: type[StepInstruction], target: Any) -> None:
    for _, instruction in made(kind):
        exchanges = isinstance(instruction, AllReduce) and instruction.at.ranks > 1
        assert (instruction.traffic > 0) != exchanges
        assert instruction.parts(target).traffic == instruction.traffic
        cost = instruction.cost(target)
        assert math.isfinite(cost)
        assert cost > target.instruction_us > 0


@KINDS
def test_operands_never_change(kind: type[StepInstruction]) -> None:
    _, instruction = made(kind)[0]
    for value in (instruction, instruction.at):
        with pytest.raises(FrozenInstanceError):
            value.__setattr__(fields(value)[0].name, 0)


@KINDS
def test_its_operands_are_numbers(kind: type[StepInstruction]) -> None:
    def leaves(outer: Any) -> list[Any]:
        inner = [field_type for _, field_type in field_types(outer)]
        return [leaf for i in inner for leaf in (leaves(i) if is_dataclass(i) else [i])]

    for leaf in leaves(kind):
        assert leaf in (int, float, bool, Range, Format) or issubclass(leaf, IntEnum)


def test_the_words_of_all_are_as_many() -> None:
    longest = max(map(word_count, INSTRUCTIONS.values()))
    assert longest < INSTRUCTIONS.words <= longest + 8
    assert INSTRUCTIONS.words % 8 == 0
    for kind in INSTRUCTIONS.values():
        _, instruction = made(kind)[0]
        words = encode(instruction)
        assert len(words) == INSTRUCTIONS.words
        assert words[0] == kind.opcode
        assert not any(words[1 + word_count(kind) :])


@KINDS
def test_those_that_lowering_makes_are_their_words(kind: type[StepInstruction]) -> None:
    for _, instruction in made(kind):
        assert decode(encode(instruction)) == instruction


@settings(max_examples=200, deadline=None)
@given(instructions())
def test_all_operands_are_in_the_words(instruction: StepInstruction) -> None:
    words = encode(instruction)
    assert all(-(2**31) <= word < 2**31 for word in words)
    decoded = decode(words)
    assert decoded == instruction
    assert type(decoded) is type(instruction)
    assert [type(getattr(decoded.at, n)) for n, _ in field_types(type(decoded.at))] == [
        type(getattr(instruction.at, n)) for n, _ in field_types(type(decoded.at))
    ]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_another_operand_is_other_words(data: Any) -> None:
    kind = data.draw(st.sampled_from(list(INSTRUCTIONS.values())))
    instruction, other = (data.draw(instructions(kind)) for _ in range(2))
    assert (encode(instruction) == encode(other)) == (instruction == other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"0 words with the opcode missing.*one of the opcodes 1 \(embed\), 2"),
        ([0] * INSTRUCTIONS.words, r"with the opcode 0"),
        ([len(INSTRUCTIONS) + 1] + [0] * (INSTRUCTIONS.words - 1), r"not a valid instruction"),
        ([1] + [0] * (INSTRUCTIONS.words - 2), rf"{INSTRUCTIONS.words - 1} words"),
        (
            [1] + [0] * (INSTRUCTIONS.words - 2) + [5],
            r"after the operands of embed must be zeros.*5",
        ),
    ],
)
def test_words_that_are_no_instruction(words: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decode(words)


def test_floats_are_kept_as_they_are_used() -> None:
    assert to_fp32(1e-6) != 1e-6
    assert to_fp32(to_fp32(1e-6)) == to_fp32(1e-6)
    for case in CASES:
        for instruction in lowered(case).instructions:
            for name, kind in field_types(type(instruction.at)):
                if kind is float:
                    value = getattr(instruction.at, name)
                    assert to_fp32(value) == value
