"""Every instruction reads scratch memory that earlier instructions of its step have written."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.reference.step_models import DELTA_APART
from tests.backends.reference.stepping import Case
from tests.vm.mutations import changed, made_scratch
from tests.vm.programs import KEPT, MANY, Touch, program_of, programs
from tpcompile.errors import VerifyError
from tpcompile.vm.groups import DeltaStep, LinearResidual
from tpcompile.vm.program import Buffer, Join, Program, Region, Role, overlap
from tpcompile.vm.program.instruction import Range
from tpcompile.vm.program.region import box_text
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.defined import check_defined
from tpcompile.vm.proof.fault import cited
from tpcompile.vm.proof.oracle import undefined
from tpcompile.vm.proof.verify import check_program, verify_program

X, Y = Buffer("x", (4,)), Buffer("y", (4,))
WHOLE, LOW, HIGH = Region(0, ((0, 4),)), Region(0, ((0, 2),)), Region(0, ((2, 4),))
OTHER = Region(1, ((0, 4),))


def on_one_worker(*steps: Touch, buffers: tuple[Buffer, ...] = (X, Y), **more: Any) -> Program:
    return program_of(buffers, steps, (tuple(range(len(steps))),), **more)


def said_of(program: Program) -> list[str]:
    faults = check_program(program)
    assert {fault.rule for fault in faults} <= {"undefined"}
    return [fault.message for fault in faults]


def test_exactly_the_reads_that_are_undefined_element_by_element_are_refused() -> None:
    tally: Counter[bool] = Counter()

    @settings(MANY, max_examples=400)
    @given(programs(), st.data())
    def compare(program: Program, data: st.DataObject) -> None:
        mutant = made_scratch(program, data.draw)
        expected = {
            f"{cited(mutant, number)} reads {mutant.buffers[region.buffer].name}"
            f"{box_text(region.box)}"
            for number, region in undefined(mutant)
        }
        faults = list(check_defined(mutant, Parts(mutant.instructions)))
        assert {fault.message.partition(", but")[0] for fault in faults} == expected
        assert len(faults) == len(expected) and {fault.rule for fault in faults} <= {"undefined"}
        scratch = any(buffer.role == Role.SCRATCH for buffer in mutant.buffers)
        if scratch and any(i.reads for i in mutant.instructions):
            tally[bool(expected)] += 1

    compare()
    assert min(tally[True], tally[False]) >= 20, tally


def test_parts_that_several_instructions_write_together() -> None:
    blocks = [Touch(joins=(Join(OTHER, (n, n + 1), 2, 2),)) for n in range(2)]
    writers = (Touch(writes=(LOW,)), *blocks, Touch(writes=(HIGH,)))
    assert said_of(on_one_worker(*writers, Touch(reads=(WHOLE, OTHER)))) == []
    (message,) = said_of(on_one_worker(writers[0], Touch((WHOLE,), label="norm"), writers[3]))
    assert message == (
        "norm (instruction 1) reads x[0:4], but no earlier instruction of the step writes x[2:4]; "
        "scratch memory is undefined before a step"
    )


def test_every_reader_is_listed_until_the_part_is_written() -> None:
    steps = (Touch((WHOLE,)), Touch((WHOLE, HIGH)), Touch(writes=(HIGH,)), Touch((WHOLE, HIGH)))
    messages = said_of(on_one_worker(*steps, Touch(writes=(LOW,)), Touch((WHOLE,))))
    assert [message.partition(" writes ")[2].partition(";")[0] for message in messages] == [
        *("x[0:4]", "x[0:4]", "x[2:4]"),
        "x[0:2]",
    ]


def test_many_pieces_are_counted() -> None:
    sparse = tuple(Region(0, ((n, n + 1),)) for n in range(1, 10, 2))
    steps = (Touch(writes=sparse), Touch((Region(0, ((0, 10),)),)))
    (message,) = said_of(on_one_worker(*steps, buffers=(Buffer("x", (10,)),)))
    assert "writes x[0:1], x[2:3], x[4:5] and 2 more parts;" in message


def test_an_own_result_is_not_an_earlier_one() -> None:
    assert "writes x[0:4];" in said_of(on_one_worker(Touch((WHOLE,), (WHOLE,))))[0]
    assert said_of(on_one_worker(Touch(writes=(WHOLE,)), Touch((WHOLE,), (WHOLE,)))) == []


def test_a_buffer_that_no_instruction_writes() -> None:
    steps = Touch(writes=(WHOLE,)), Touch((WHOLE, OTHER))
    (message,) = said_of(on_one_worker(*steps))
    assert "(instruction 1) reads y[0:4], but no earlier" in message
    assert said_of(on_one_worker(*steps, buffers=(X, replace(Y, role=Role.WEIGHT)))) == []


@pytest.mark.parametrize("repeats", [False, True])
def test_the_step_before_defines_nothing(repeats: bool) -> None:
    steps = Touch((WHOLE,)), Touch(writes=(WHOLE,))
    assert len(said_of(on_one_worker(*steps, repeats=repeats))) == 1
    persistent = (replace(X, role=KEPT), Y)
    assert said_of(on_one_worker(*steps, buffers=persistent, repeats=repeats)) == []
    logits = (replace(X, role=Role.LOGITS), Y)
    assert len(said_of(on_one_worker(*steps, buffers=logits, repeats=repeats))) == 1


def test_another_rank_may_write_it() -> None:
    buffers = X, replace(Y, rank=1)
    steps = Touch(writes=(WHOLE,)), Touch(writes=(OTHER,), rank=1), Touch((WHOLE, OTHER))
    whole = program_of(buffers, steps, ((0, 2), (1,)), ranks=2)
    assert said_of(whole) == []
    without = replace(whole, instructions=changed(steps, 1, Touch(rank=1)))
    assert "(instruction 2) reads y[0:4]" in said_of(without)[0]


def test_a_deadlock_does_not_hide_it() -> None:
    program = on_one_worker(Touch((WHOLE,)), Touch(writes=(WHOLE,)))
    waits = (replace(program, queues=((1, 0),)), replace(program, waits=((), ())))
    assert all("undefined" in {f.rule for f in check_program(p)} for p in waits)


def _with(program: Program, number: int, instruction: Any) -> Program:
    return replace(program, instructions=changed(program.instructions, number, instruction))


def _number_of(program: Program, kind: type) -> int:
    return next(
        n for n, instruction in enumerate(program.instructions) if type(instruction) is kind
    )


def test_a_delta_step_whose_gate_is_its_own_result() -> None:
    program = Case(DELTA_APART, 1).program
    assert check_program(program) == []
    number = _number_of(program, DeltaStep)
    step: Any = program.instructions[number]
    mutant = _with(program, number, replace(step, at=replace(step.at, z=step.at.out, first_z=0)))
    messages = [fault.message for fault in check_program(mutant) if fault.rule == "undefined"]
    name = program.buffers[step.at.out].name
    assert messages[0].startswith(f"{cited(program, number)} reads {name}[")
    with pytest.raises(VerifyError, match="violates the rule 'undefined'"):
        verify_program(mutant)


def test_a_writer_of_fewer_rows() -> None:
    program = Case("tiny-qwen3").program
    number = _number_of(program, LinearResidual)
    step: Any = program.instructions[number]
    rows = Range(step.rows.start, step.rows.stop - 1)
    messages = [f.message for f in check_program(_with(program, number, replace(step, rows=rows)))]
    last = f"{program.buffers[step.at.out].name}[0:5, {rows.stop}:{rows.stop + 1}]"
    assert any(
        f"no earlier instruction of the step writes {last};" in message for message in messages
    ), messages


def test_every_instruction_whose_result_is_the_first_in_its_memory() -> None:
    """Without a later one, such as a second layer's, readers find the result of an earlier one."""
    program = Case("tiny-qwen3").program
    written: list[Region] = []
    tried: set[str] = set()
    for number, instruction in enumerate(program.instructions):
        writes = [r for r in instruction.writes if program.buffers[r.buffer].role == Role.SCRATCH]
        first = not any(
            r.buffer == w.buffer and overlap(r.box, w.box) for r in writes for w in written
        )
        if writes and first:
            faults = check_program(_with(program, number, Touch(rank=instruction.rank)))
            assert "undefined" in {fault.rule for fault in faults}, instruction.label
            tried.add(instruction.name)
        written += writes
    assert len(tried) >= 6, tried
