"""Encoded programs contain all that executors need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.vm.groups.lowered import CASES, Case, step_program
from tests.vm.programs import Touch
from tpcompile.errors import UnsupportedError
from tpcompile.vm.groups.project import LinearResidual
from tpcompile.vm.program import Program, Wait
from tpcompile.vm.program.encoding import decode_program, encode_program, families, program_words
from tpcompile.vm.program.instruction import StepInstruction, WeightInstruction
from tpcompile.vm.program.instruction_set import INSTRUCTIONS, encode
from tpcompile.vm.program.program import Instruction


@pytest.mark.parametrize("policy", ["zigzag", "critical-path", "dynamic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_that_lowering_makes_round_trip(case: Case, policy: str) -> None:
    program = step_program(case, policy)
    encoded = encode_program(program)
    empty = Program(program.buffers, (), (), (), (), program.ranks, program.sharing, True)
    assert decode_program(encoded, replace(empty, name=program.name)) == program
    arrays = [encoded.words, encoded.totals]
    for lists in (encoded.queues, encoded.waits, encoded.signals):
        arrays += [lists.offsets, lists.values]
    assert all(array.dtype == torch.int32 and array.is_contiguous() for array in arrays)


def test_words_are_those_of_each_instruction() -> None:
    program = step_program(CASES[0])
    words = program_words(program.instructions)
    assert words.shape == (len(program.instructions), INSTRUCTIONS.words)
    expected = [encode(i) for i in program.instructions if isinstance(i, StepInstruction)]
    assert words.tolist() == expected


def test_lists_lie_behind_each_other() -> None:
    instructions = step_program(CASES[0]).instructions[:3]
    waits = ((), (Wait(2, 5), Wait(0, 0)), (Wait(1, 7),))
    program = Program((), instructions, ((2, 0), (), (1,)), waits, ((0, 0), (), (1,)))
    encoded = encode_program(program)
    assert encoded.queues.offsets.tolist() == [0, 2, 2, 3]
    assert encoded.queues.values.tolist() == [2, 0, 1]
    assert encoded.waits.offsets.tolist() == [0, 0, 2, 3]
    assert encoded.waits.values.tolist() == [[2, 5], [0, 0], [1, 7]]
    assert list(encoded.signals) == [[0, 0], [], [1]]
    assert encoded.totals.tolist() == [2, 1, 0], "no instruction signals the last counter"


def test_an_empty_program() -> None:
    program = Program((), (), ((),), (), ())
    encoded = encode_program(program)
    assert encoded.words.shape == (0, INSTRUCTIONS.words)
    assert encoded.waits.values.shape == (0, 2)
    assert encoded.totals.shape == (0,)
    assert decode_program(encoded, program) == program


def test_what_cannot_be_encoded() -> None:
    with pytest.raises(UnsupportedError, match=r"touch has no opcode.*At touch 3"):
        program_words([Touch(label="touch 3")])
    fine = step_program(CASES[0]).instructions[0]
    assert isinstance(fine, StepInstruction)
    wide = replace(fine, at=replace(fine.at, rows=2**31))
    with pytest.raises(UnsupportedError, match=r"instruction 1.*Found 2147483648"):
        program_words([fine, wide])


def test_families_multiply_by_the_same_values() -> None:
    """A phase is a family, also with Q, K and V; other columns and terms are not part of it."""
    for case in CASES:
        program = step_program(case)
        instructions, firsts = program.instructions, families(program).tolist()
        for number, first in enumerate(firsts):
            instruction, before = instructions[number], instructions[first]
            assert firsts[first] == first and type(instruction) is type(before)
            if first < number:
                assert _multiplied(instruction) == _multiplied(before)
                assert all(
                    getattr(instruction, name) == getattr(before, name)
                    for name in instruction.apart
                )
            elif number > 0 and type(instruction) is type(instructions[number - 1]):
                previous = instructions[number - 1]
                if isinstance(instruction, WeightInstruction) and (
                    _multiplied(instruction) == _multiplied(previous)
                ):
                    assert any(
                        getattr(instruction, n) != getattr(previous, n) for n in instruction.apart
                    )


def _multiplied(instruction: Instruction) -> tuple[object, int]:
    return getattr(instruction.at, "normed", instruction.at), instruction.at.weight


def test_a_family_ends_where_its_values_change() -> None:
    program = step_program(CASES[0])
    first = next(i for i in program.instructions if isinstance(i, LinearResidual))
    for number, families_of in ((first.at.out, [0, 1]), (first.at.x, [0, 0])):
        instruction = replace(first, at=replace(first.at, x=number))
        actual = families(replace(program, instructions=(instruction, instruction)))
        assert actual.tolist() == families_of
