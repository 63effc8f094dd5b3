"""The verifier agrees with the oracle: it accepts exactly the programs that cannot go wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.reference.stepping import Case
from tests.vm.mutations import MUTATIONS, Mutation, changed, step_wait_dropped
from tests.vm.programs import MANY, Touch, program_of, programs
from tpcompile.errors import VerifyError
from tpcompile.vm.groups import LinearResidual
from tpcompile.vm.program import Buffer, Join, Program, Region, Wait
from tpcompile.vm.program.instruction import NONE
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.oracle import broken, overtaken
from tpcompile.vm.proof.verify import check_program, verify_program


@MANY
@given(programs())
def test_what_is_derived_is_right_and_is_accepted(program: Program) -> None:
    assert not broken(program)
    assert check_program(program) == []
    verify_program(program)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_verifier_says_what_the_adversary_says(mutation: Mutation) -> None:
    assert len(MUTATIONS) * 120 >= 2000
    tally = _judge(mutation, 120)
    assert tally["broken"] >= 5, tally  # a duplicate signal rarely breaks anything


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_and_so_it_does_of_ten_thousand(mutation: Mutation) -> None:
    _judge(mutation, 10_000 // len(MUTATIONS) + 1)


def test_few_are_refused_that_are_safe() -> None:
    """Few safe programs are refused, namely some in which counters of two steps mix harmlessly."""
    total = sum((_judge(mutation, 40) for mutation in MUTATIONS), Counter())
    assert total["refused although safe"] <= 0.05 * total["safe"], total


def _judge(mutation: Mutation, count: int) -> Counter[str]:
    tally: Counter[str] = Counter()

    @settings(MANY, max_examples=count)
    @given(st.data())
    def judge(data: st.DataObject) -> None:
        program = data.draw(programs(repeats=True if mutation is step_wait_dropped else None))
        mutant = mutation(program, data.draw)
        spoilt = broken(mutant)
        faults = check_program(mutant)
        if spoilt:
            tally["broken"] += 1
            assert faults, "the adversary breaks what the verifier accepts"
        else:
            tally["safe"] += 1
            tally["refused although safe"] += bool(faults)

    judge()
    return tally


X = Buffer("x", (4,))
WHOLE, LOW, HIGH = Region(0, ((0, 4),)), Region(0, ((0, 2),)), Region(0, ((2, 4),))


def residual() -> Program:
    """Return two writes of halves, two reads of the whole, and two writes again, on two workers."""
    steps = (
        Touch(writes=(LOW,), label="down 0"),
        Touch(writes=(HIGH,), label="down 1"),
        Touch(reads=(WHOLE,), label="norm 0"),
        Touch(reads=(WHOLE,), label="norm 1"),
        Touch(writes=(LOW,), label="down 2"),
        Touch(writes=(HIGH,), label="down 3"),
    )
    return program_of((X,), steps, ((0, 2, 4), (1, 3, 5)))


def test_groups_share_counters() -> None:
    program = residual()
    assert program.counters == 2
    assert program.waits[2] == program.waits[3] == (Wait(0, 2),)
    assert program.waits[4] == program.waits[5] == (Wait(1, 2),)


def test_27_a_residual_written_while_another_still_reads_it() -> None:
    """Write after read: the second down projection does not wait for the other worker's norm."""
    program = residual()
    careless = replace(program, waits=(*program.waits[:4], (), program.waits[5]))
    (fault,) = check_program(careless)
    assert fault.rule == "order"
    assert "norm 1 (instruction 3) reads x[0:4]" in fault.message
    assert "down 2 (instruction 4) writes x[0:2]" in fault.message
    with pytest.raises(VerifyError, match="the second can run first"):
        verify_program(careless)


def test_30_a_counter_that_the_wrong_signals_can_bring_there() -> None:
    """Both pairs of writers share a counter, and the readers wait for two of four signals."""
    program = residual()
    shared = replace(
        program,
        waits=tuple(tuple(Wait(0, w.until) for w in waits) for waits in program.waits),
        signals=((0,), (0,), (0,), (0,), (), ()),
    )
    assert any(fault.rule == "order" for fault in check_program(shared))


BROKEN: dict[str, tuple[Callable[[Program], Program], str]] = {
    "an instruction in no queue": (
        lambda p: replace(p, queues=(p.queues[0], p.queues[1][:-1])),
        "occurs 0 times in the queues",
    ),
    "an instruction twice": (
        lambda p: replace(p, queues=(p.queues[0], (*p.queues[1], 0))),
        "occurs 2 times in the queues",
    ),
    "a queue of an unknown instruction": (
        lambda p: replace(p, queues=(p.queues[0], (*p.queues[1], 9))),
        "queue 1 contains instruction 9, but the program has 6 instructions",
    ),
    "too few waits": (
        lambda p: replace(p, waits=p.waits[:-1]),
        "6 instructions, 5 lists of waits and 6 lists of signals",
    ),
    "a region beyond its buffer": (
        lambda p: replace(p, buffers=(Buffer("x", (3,)),)),
        "a region outside of x: 2:4 in dimension 0, whose extent is 3",
    ),
    "a missing buffer": (
        lambda p: replace(p, buffers=()),
        "accesses buffer 0, but the program has 0 buffers",
    ),
    "a threshold that is never met": (
        lambda p: replace(p, waits=(*p.waits[:5], (Wait(1, 3),))),
        "waits for 3 signals of counter 1, which gets 2; the threshold must be from 0 to 2",
    ),
    "a negative threshold": (
        lambda p: replace(p, waits=(*p.waits[:5], (Wait(1, -1),))),
        "waits for -1 signals of counter 1",
    ),
    "a wait for an invalid counter": (
        lambda p: replace(p, waits=(*p.waits[:5], (Wait(-1, 1),))),
        "down 3 (instruction 5) waits for counter -1",
    ),
    "a signal of an invalid counter": (
        lambda p: replace(p, signals=((-1,), *p.signals[1:])),
        "down 0 (instruction 0) signals counter -1",
    ),
    "a cycle": (
        lambda p: replace(p, waits=((Wait(1, 1),), *p.waits[1:]), queues=((0, 2, 4), (1, 5, 3))),
        "instructions never run; down 0 (instruction 0), the first of them in its queue, waits for",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_faults_say_what_is_wrong(name: str) -> None:
    change, message = BROKEN[name]
    faults = check_program(change(residual()))
    assert any(message in fault.message for fault in faults), faults


Q = Buffer("q", (8,))
HEAD, NEXT = Region(0, ((0, 4),)), Region(0, ((4, 8),))


def heads() -> Program:
    """Return two heads of two blocks each, and a reader per head, each on its own worker."""
    blocks = [
        Touch(joins=(Join(region, part, 4, 2),), label=f"block {part}")
        for region in (HEAD, NEXT)
        for part in ((0, 2), (2, 4))
    ]
    readers = [Touch(reads=(region,), label="partial") for region in (HEAD, NEXT)]
    steps = (*blocks, *readers)
    return program_of((Q,), steps, tuple((n,) for n in range(6)), repeats=True)


def _with_join(program: Program, number: int, **change: Any) -> Program:
    old: Any = program.instructions[number]
    new = replace(old, joins=tuple(join._replace(**change) for join in old.joins))
    return replace(program, instructions=changed(program.instructions, number, new))


SPLIT: dict[str, tuple[Callable[[Program], Program], str, str]] = {
    "rows that no block computes": (
        lambda p: _with_join(p, 0, part=(1, 2)),
        "heads",
        "rows 0 to 1 of the head q[0:4] are computed by no block",
    ),
    "rows computed twice": (
        lambda p: _with_join(p, 1, part=(1, 4)),
        "heads",
        "rows 1 to 2 of the head q[0:4] are computed twice",
    ),
    "a head that ends early": (
        lambda p: _with_join(p, 1, part=(2, 3)),
        "heads",
        "the head q[0:4] has 4 rows, but its blocks end at row 3",
    ),
    "a block that counts wrongly": (
        lambda p: _with_join(p, 1, arrivals=1),
        "heads",
        "block (2, 4) (instruction 1) gives the head q[0:4] 4 rows and an arrival count of 1; "
        "these must be 4 rows, as in its first block, block (0, 2) (instruction 0), and an "
        "arrival count of 2, the number of blocks that arrive before any other access",
    ),
    "two heads with one slot": (
        lambda p: _with_join(_with_join(p, 2, region=HEAD), 3, region=HEAD),
        "order",
        "block (2, 4) (instruction 1) writes a block of q[0:4] and "
        "block (0, 2) (instruction 2) writes a block of q[0:4]",
    ),
    "a reader that does not wait for the last block": (
        lambda p: replace(p, waits=changed(p.waits, 4, ())),
        "order",
        "block (2, 4) (instruction 1) writes a block of q[0:4] and "
        "partial (instruction 4) reads q[0:4]",
    ),
    "a block that does not wait for the step before": (
        lambda p: replace(p, waits=changed(p.waits, 2, ())),
        "steps",
        "block (0, 2) (instruction 2) can start before the previous step is complete",
    ),
    "another rank's worker": (
        lambda p: replace(p, ranks=2),
        "rank",
        "block (2, 4) (instruction 3) belongs to rank 0 but is in queue 3, which belongs to rank 1",
    ),
    "queues that do not divide": (
        lambda p: replace(p, ranks=4),
        "shape",
        "the program has ranks=4, sharing=1 and 6 queues",
    ),
}


@pytest.mark.parametrize("name", SPLIT)
def test_heads_steps_and_ranks(name: str) -> None:
    assert check_program(heads()) == []
    change, rule, message = SPLIT[name]
    faults = check_program(change(heads()))
    assert any(fault.rule == rule and message in fault.message for fault in faults), faults


def test_order_that_only_a_queue_keeps_is_none_where_workers_share_it() -> None:
    program = program_of((X,), (Touch(writes=(WHOLE,)), Touch(reads=(WHOLE,))), ((0, 1),))
    assert check_program(program) == []
    (fault,) = check_program(replace(program, sharing=2))
    assert fault.rule == "order"
    assert "valid for any number of workers per queue" in fault.message


def test_a_shared_queue_is_proved_for_any_number_of_workers() -> None:
    """Three workers could swap the first and third instruction, so two are refused as well."""
    steps = (Touch(writes=(WHOLE,)), Touch(), Touch(reads=(WHOLE,)))
    program = program_of((X,), steps, ((0, 1, 2),))
    waits, signals = ((), (Wait(0, 1),), ()), ((0,), (), ())
    loose = replace(program, waits=waits, signals=signals, sharing=2)
    assert [fault.rule for fault in check_program(loose)] == ["order"]
    assert overtaken(loose) == (0, 2)
    tight = replace(loose, waits=((), (), (Wait(0, 1),)))
    for sharing in (1, 2, 3, 100):
        assert check_program(replace(tight, sharing=sharing)) == []


@pytest.mark.parametrize("field", ["x", "weight", "residual", "out"])
def test_an_operand_that_must_be_there(field: str) -> None:
    """A missing operand is refused, since -1 would address the last buffer."""
    program = Case("tiny-qwen3").program
    number = next(
        n
        for n, instruction in enumerate(program.instructions)
        if isinstance(instruction, LinearResidual)
    )
    instruction: Any = program.instructions[number]
    without = replace(instruction, at=replace(instruction.at, **{field: NONE}))
    faults = check_program(
        replace(program, instructions=changed(program.instructions, number, without))
    )
    assert [fault.rule for fault in faults][:1] == ["bounds"]
    assert "buffer -1" in faults[0].message


@pytest.mark.parametrize("buffer", [0, 1, 2])
def test_regions_outside_of_buffers(buffer: int) -> None:
    """Also if the caller has the parts, and if the region is of a buffer that is only read."""
    wrong = Touch(reads=(Region(buffer, ((2, 9),)),))
    steps = (Touch(writes=(WHOLE,)), wrong, wrong)
    program = program_of((X, Buffer("y", (4,))), (steps[0], Touch(), Touch()), ((0, 1, 2),))
    program = replace(program, instructions=steps)
    for parts in (None, Parts(program.instructions), Parts(steps[:1])):
        faults = check_program(program, parts)
        assert [fault.rule for fault in faults] == ["bounds", "bounds"]


def test_a_counter_below_zero() -> None:
    program = Case("tiny-qwen3").program
    signals = changed(program.signals, 0, (-500,))
    assert check_program(replace(program, signals=signals))[0].rule == "counter"


def test_a_counter_that_would_take_all_memory() -> None:
    """An absurd counter number is refused without allocating that many counters."""
    program = Case("tiny-qwen3").program
    signals = changed(program.signals, 0, (10**15,))
    (fault,) = check_program(replace(program, signals=signals))
    assert fault.rule == "counter" and "has 1000000000000001 counters, but only" in fault.message
