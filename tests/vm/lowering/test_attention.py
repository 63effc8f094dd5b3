"""Lowering of attention refuses too many spans or slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.backends.reference.stepping import BLOCK, Case
from tpcompile.errors import UsageError
from tpcompile.vm.groups import PartialAttention
from tpcompile.vm.lowering import lower
from tpcompile.vm.program.instruction import Range


def test_a_block_for_each_span() -> None:
    case = Case("tiny-qwen3", lengths=(1,), spans=3, workers=6)
    lowered = lower(case.graph, replace(case.plan, max_seq_len=2 * BLOCK + 1))
    assert {
        instruction.span
        for instruction in lowered.instructions
        if isinstance(instruction, PartialAttention)
    } == {
        Range(0, 1),
        Range(1, 2),
        Range(2, 3),
    }
    with pytest.raises(UsageError, match="spans=3 exceeds the 2 blocks of the longest sequence"):
        lower(case.graph, replace(case.plan, max_seq_len=2 * BLOCK))


def test_slots_are_counted_in_whole_blocks() -> None:
    case = Case("tiny-qwen3", lengths=(1,))
    with pytest.raises(UsageError, match="2,147,483,648 slots in the KV cache"):
        lower(case.graph, replace(case.plan, max_seq_len=2**31 - 1))


def test_a_large_batch_has_fewer_instructions_than_spans() -> None:
    """Each run of spans is an instruction; runs are as long as the sequences and heads allow."""
    for batch, longest in ((1, 1), (2, 1), (4, 2), (16, 3)):
        case = Case("tiny-qwen3", lengths=(1,) * batch, spans=3, workers=12)
        instructions = lower(case.graph, replace(case.plan, max_seq_len=3 * BLOCK)).instructions
        runs = [
            instruction.span
            for instruction in instructions
            if isinstance(instruction, PartialAttention) and not instruction.layer
        ]
        assert max(run.extent for run in runs) == longest
        assert sum(run.extent for run in runs) == batch * 2 * 3


@pytest.mark.parametrize(
    ("workers", "rows", "spans"), [(1, 4, 3), (6, 4, 2), (12, 4, 1), (24, 2, 1), (64, 1, 1)]
)
def test_a_few_workers_attend_several_rows_of_a_sequence_at_a_time(
    workers: int, rows: int, spans: int
) -> None:
    """Runs of rows are as long as the other sequences, heads and spans allow; then those of spans.

    Two sequences of four rows have two KV heads and three spans.
    """
    case = Case("tiny-qwen3", lengths=(1,) * 8, spans=3, workers=workers)
    plan = replace(case.plan, max_seq_len=3 * BLOCK, sequence_rows=4)
    instructions = lower(case.graph, plan).instructions
    partials = [
        instruction
        for instruction in instructions
        if isinstance(instruction, PartialAttention) and not instruction.layer
    ]
    assert max(partial.sequences.extent for partial in partials) == rows
    assert max(partial.span.extent for partial in partials) == spans
    assert all(
        partial.sequences.start // 4 == (partial.sequences.stop - 1) // 4 for partial in partials
    )
    assert sum(partial.sequences.extent * partial.span.extent for partial in partials) == 8 * 2 * 3


@pytest.mark.parametrize("context", [1, 190, 500, 1024])
def test_the_cost_of_spans_is_that_of_a_sequence_of_the_context(context: int) -> None:
    case = Case("tiny-qwen3", lengths=(1,), spans=3)
    instructions = lower(
        case.graph, replace(case.plan, max_seq_len=1024, context=context)
    ).instructions
    partials = [
        instruction
        for instruction in instructions
        if isinstance(instruction, PartialAttention) and not instruction.layer
    ]
    heads = sum(partial.heads.extent for partial in partials if not partial.span.start)
    assert sum(partial.values for partial in partials) == context * heads
