"""Conflicts are recorded until everything accessed has been overwritten, and no longer."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given

from tests.vm.programs import MANY, Touch, programs
from tpcompile.vm.program import Buffer, Program, Region
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.conflict import conflict, heads_of
from tpcompile.vm.proof.earlier import Earlier
from tpcompile.vm.proof.known import NOTHING, Several, missing

WHOLE, LOW, HIGH = Region(0, ((0, 4),)), Region(0, ((0, 2),)), Region(0, ((2, 4),))


def earlier(program: Program) -> list[set[int]]:
    sets = Earlier(program, heads_of(program.instructions)).by_instruction
    return [
        {n for some in conflicts for n in _numbers(some)} - {number}
        for number, conflicts in enumerate(sets)
    ]


def _numbers(some: Several) -> set[int]:
    first, last, bits = some
    assert missing(some, NOTHING) == last
    return {first + offset for offset in range(bits.bit_length()) if bits >> offset & 1}


@MANY
@given(programs())
def test_every_conflict_is_there_or_behind_one_that_is(program: Program) -> None:
    direct = earlier(program)
    heads = heads_of(program.instructions)
    behind: list[set[int]] = []
    for numbers in direct:
        behind.append(numbers.union(*(behind[early] for early in numbers)))
    for early, late in combinations(range(len(program.instructions)), 2):
        if conflict(program, heads, early, late) is not None:
            assert early in behind[late]
        else:
            assert early not in direct[late]


def test_readers_are_forgotten_once_every_cell_is_written_over() -> None:
    steps = (Touch(reads=(WHOLE,)), Touch(writes=(LOW,)), Touch(writes=(HIGH,)))
    again = (Touch(writes=(LOW,)), Touch(writes=(WHOLE,)))
    program = Program((Buffer("x", (4,)),), (*steps, *again), (), (), ())
    assert earlier(program) == [set(), {0}, {0}, {1}, {2, 3}]


def test_parts_of_other_instructions_are_ignored() -> None:
    steps = (Touch(writes=(LOW,)), Touch(writes=(WHOLE,)))
    program = Program((Buffer("x", (4,)),), steps, (), (), ())
    heads = heads_of(steps)
    apart = Parts((Touch(writes=(LOW,)), Touch(writes=(HIGH,))))
    for parts in (None, Parts(steps), apart):
        sets = Earlier(program, heads, parts).by_instruction[1]
        assert [_numbers(some) for some in sets] == [{0}]
