"""Several rows of one sequence in a step: each has the bits of a step with this row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from tests.backends.reference.step_models import (
    APART,
    EIGHT_OF_MANY,
    EXPERTS,
    HYBRID,
    HYBRID_EXPERTS,
    HYBRID_ODD,
    INT4,
    SHARED,
    WINDOWED,
)
from tests.backends.reference.stepping import BLOCK, Case, steps_on, tables_of, texts
from tpcompile.backends.executor import Executor
from tpcompile.backends.reference.orders import in_program_order, shuffled
from tpcompile.backends.reference.regions import verify_regions
from tpcompile.errors import UsageError, VerifyError
from tpcompile.vm.groups.attention import PartialAttention
from tpcompile.vm.groups.delta import DeltaStep
from tpcompile.vm.program.region import Region
from tpcompile.vm.proof.verify import check_program

MODELS = (
    *("tiny-qwen2", "tiny-qwen3", WINDOWED, EXPERTS, SHARED, EIGHT_OF_MANY, INT4),
    *(HYBRID, HYBRID_ODD, HYBRID_EXPERTS),
)
LENGTHS = (1, 2 * BLOCK - 1, 3 * BLOCK)
ROWS = (1, 4, 3)
"""The second sequence goes on in a new block, and the third begins one."""


def placed(case: Case) -> dict[str, Any]:
    """Return the inputs of a step with `case.rows` rows of each sequence."""
    tokens, lengths, tables = [], [], []
    for text, first, count, table in zip(
        texts(case.model, case.lengths),
        case.lengths,
        case.rows,
        tables_of(case.lengths),
        strict=True,
    ):
        for length in range(first, first + count):
            tokens.append(text[length - 1])
            lengths.append(length)
            tables.append(table)
    starts = [0, *accumulate(case.rows)]
    write = torch.arange(len(tokens)) + len(case.lengths)
    read = torch.cat([torch.tensor([0]), write[:-1]])
    read[starts[:-1]] = torch.arange(len(case.lengths))
    return {
        "read": read,
        "write": write,
        "tokens": torch.stack(tokens),
        "lengths": torch.tensor(lengths),
        "tables": torch.stack(tables),
        "starts": starts,
    }


def logits_of_rows(executor: Executor, case: Case, *options: Any) -> list[torch.Tensor]:
    """Return the logits of the rows of each sequence in one step."""
    executor.place(**placed(case))
    executor.run(1, *options)
    return list(executor.logits[: sum(case.rows)].clone().split(list(case.rows)))


def logits_of_steps(executor: Executor, case: Case) -> list[torch.Tensor]:
    """Return the same from as many steps as the longest sequence has rows."""
    alone = replace(case, rows=())
    steps = torch.stack(steps_on(executor, alone, max(case.rows)), 1)
    return [logits[:count] for logits, count in zip(steps, case.rows, strict=True)]


def same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", [*MODELS, APART])
@pytest.mark.parametrize("lowering", ["heads", "rows"])
def test_rows_have_the_bits_of_steps(model: str, tp: int, lowering: str) -> None:
    case = Case(model, tp, LENGTHS, lowering=lowering, rows=ROWS, spans=3)
    expected = logits_of_steps(replace(case, rows=()).machine(), case)
    for order in (in_program_order, shuffled(5)):
        assert same(logits_of_rows(case.machine(), case, order), expected)


def test_only_declared_regions_are_read_or_written() -> None:
    for case in (
        Case("tiny-qwen3", 1, LENGTHS, rows=ROWS, spans=3),
        Case("tiny-qwen2", 2, LENGTHS, rows=ROWS, kv="int8", lowering="rows"),
        Case(HYBRID, 2, LENGTHS, rows=ROWS),
    ):
        machine = case.machine()
        machine.place(**placed(case))
        verify_regions(machine.memory)


@pytest.mark.parametrize("spans", [1, 3])
def test_regions_without_the_new_tokens_of_other_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch, spans: int
) -> None:
    """The regions of a program whose rows are sequences of their own, an instruction for each."""
    case = Case("tiny-qwen3", 1, LENGTHS, rows=ROWS, spans=spans, workers=48)
    machine = case.machine()
    machine.place(**placed(case))
    true = PartialAttention.reads.func  # type: ignore[attr-defined]

    def narrowed(instruction: PartialAttention) -> tuple[Region, ...]:
        last = instruction.span.stop == instruction.at.spans
        return tuple(
            Region(number, (*box[:2], instruction.sequences, *box[3:]))
            if number == instruction.at.cache
            else Region(number, box)
            for number, box in true(instruction)
            if last or number != instruction.at.cache or box[-1] == (0, 1)
        )

    monkeypatch.setattr(PartialAttention, "reads", property(narrowed))
    with pytest.raises(VerifyError, match=r"partial_attention are wrong: .* undeclared reads"):
        verify_regions(machine.memory)


def test_spans_wait_for_the_new_tokens_of_all_rows() -> None:
    """Without an order between a key and the spans of another row, a program is refused."""
    program = Case("tiny-qwen3", 1, LENGTHS, rows=ROWS, spans=3).program
    assert not check_program(program)
    for number, instruction in enumerate(program.instructions):
        if (
            isinstance(instruction, PartialAttention)
            and instruction.span.start == 0
            and program.waits[number]
        ):
            waits = (*program.waits[:number], (), *program.waits[number + 1 :])
            assert check_program(replace(program, waits=waits))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": [0, 1, 8]}, "row 5.*length 12 after 10"),
        ({"starts": [0, 1, 5]}, "must increase from 0 to the number of rows"),
        ({"starts": [0, 5, 1, 8]}, "must increase from 0 to the number of rows"),
        ({"starts": None}, "Sequences 1 and 2 must not share the slots of new tokens"),
        ({"lengths": torch.tensor([1, 7, 9, 8, 10, 12, 13, 14])}, "length 9 after 7"),
    ],
)
def test_rows_that_are_not_the_next_tokens(changes: dict[str, Any], message: str) -> None:
    case = Case("tiny-qwen3", 1, LENGTHS, rows=ROWS, spans=3)
    with pytest.raises(UsageError, match=message):
        case.machine().place(**placed(case) | changes)


def test_a_row_in_other_blocks_is_refused() -> None:
    case = Case("tiny-qwen3", 1, LENGTHS, rows=ROWS, spans=3)
    inputs = placed(case)
    inputs["tables"][3, 0] = inputs["tables"][0, 0]
    with pytest.raises(UsageError, match=r"row 3.*one more token in the same blocks"):
        case.machine().place(**inputs)


def test_a_launch_of_rows_has_one_step() -> None:
    case = Case("tiny-qwen3", 1, LENGTHS, rows=ROWS, spans=3)
    machine = case.machine()
    machine.place(**placed(case))
    with pytest.raises(UsageError, match=r"Only one step.*2 steps of 8 rows of 3 sequences"):
        machine.run(2)


def test_regions_without_the_states_of_other_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(HYBRID, 1, LENGTHS, rows=ROWS)
    machine = case.machine()
    machine.place(**placed(case))
    true = DeltaStep.reads.func  # type: ignore[attr-defined]

    def narrowed(instruction: DeltaStep) -> tuple[Region, ...]:
        return tuple(
            Region(number, (box[0], (instruction.sequence, instruction.sequence + 1), *box[2:]))
            if number in (instruction.at.states, instruction.at.tails)
            else Region(number, box)
            for number, box in true(instruction)
        )

    monkeypatch.setattr(DeltaStep, "reads", property(narrowed))
    with pytest.raises(VerifyError, match=r"delta_step are wrong: .* undeclared reads"):
        verify_regions(machine.memory)


def test_a_row_resumes_from_the_row_before_it() -> None:
    case = Case(HYBRID, 1, LENGTHS, rows=ROWS)
    inputs = placed(case)
    inputs["read"][3] = inputs["read"][1]
    with pytest.raises(UsageError, match="Row 3 must read the state that the row before it"):
        case.machine().place(**inputs)


@pytest.mark.parametrize(("together", "message"), [(1, "one row per"), (4, "multiples of 4")])
def test_a_program_that_does_not_order_rows_refuses_them(together: int, message: str) -> None:
    case = Case("tiny-qwen3", 1, LENGTHS, rows=ROWS)
    machine = case.machine()
    machine.memory.sequence_rows = together
    with pytest.raises(UsageError, match=f"must be rows that may belong together.*{message}"):
        machine.place(**placed(case))
