"""Tests of which blocks form a head, and of which instructions conflict."""

from __future__ import annotations

from tests.vm.programs import Touch
from tpcompile.vm.program import Buffer, Join, Program, Region
from tpcompile.vm.proof.conflict import conflict, heads_of

ONE, TWO = Region(0, ((0, 4),)), Region(0, ((4, 8),))


def block(region: Region, place: int = 0, arrivals: int = 2) -> Touch:
    return Touch(joins=(Join(region, (place, place + 1), arrivals, arrivals),))


def test_heads_in_turn_are_told_apart() -> None:
    heads = heads_of((block(ONE), block(TWO), block(ONE), block(TWO), block(ONE), block(ONE)))
    assert heads.by_instruction == ((0,), (1,), (0,), (1,), (2,), (2,))
    assert [[number for number, _ in head.blocks] for head in heads.all] == [[0, 2], [1, 3], [4, 5]]


def test_whatever_else_touches_a_head_ends_it() -> None:
    middle = Region(0, ((2, 6),))
    for touch in (Touch(reads=(middle,)), Touch(writes=(middle,)), block(middle, arrivals=1)):
        heads = heads_of((block(ONE), touch, block(ONE)))
        assert heads.by_instruction[0] != heads.by_instruction[2]
    heads = heads_of((block(ONE), Touch(reads=(TWO,)), block(ONE)))
    assert heads.by_instruction == ((0,), (), (0,))


def test_blocks_of_one_head_do_not_conflict_and_others_do() -> None:
    steps = (block(ONE), block(ONE), block(ONE), Touch(reads=(ONE,)), Touch(reads=(ONE,)))
    program = Program((Buffer("q", (8,)),), steps, (), (), ())
    heads = heads_of(steps)
    assert conflict(program, heads, 0, 1) is None
    assert conflict(program, heads, 0, 2) == (ONE, ONE)
    assert conflict(program, heads, 1, 3) == (ONE, ONE)
    assert conflict(program, heads, 3, 4) is None
