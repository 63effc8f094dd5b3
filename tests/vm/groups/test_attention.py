"""Attention in spans agrees with the op around block boundaries, and merges spans in a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch

from tests.vm.groups.desk import Desk, cuts, near, random, unknown, whole_numbers
from tpcompile.ir.ops.decode.attention import cached_attention, partial_attention
from tpcompile.vm.groups import AttentionReduce, PartialAttention
from tpcompile.vm.groups import attention as module
from tpcompile.vm.groups.attention import AttentionOperands, ReduceOperands
from tpcompile.vm.program import Format
from tpcompile.vm.program.instruction import Range, to_fp32

WIDTH, BLOCK, LAYER, MOST = 8, 4, 1, 8
SCALE = to_fp32(WIDTH**-0.5)
READERS = ((0, 0, 0, 1, 1), (0, 1), (0, 0, 0))
"""The KV head of each query head: uneven groups, one per head, one for all."""
LENGTHS = ((1, 3, 4, 5), (27, 8, 1, 32))
POOL = 40


class Work:
    """A cache with scattered blocks and NaN in unused slots, and its attention instructions."""

    def __init__(
        self,
        lengths: Sequence[int] = LENGTHS[0],
        readers: Sequence[int] = READERS[0],
        spans: int = 3,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        size: float = 1.0,
        sequence_rows: int = 1,
    ) -> None:
        self.lengths, self.readers, self.spans, self.window = lengths, readers, spans, window
        batch, heads, shared = len(lengths), len(readers), max(readers) + 1
        self.q = (size * random(batch, heads, WIDTH)).to(dtype)
        self.cache = unknown(2, 2, POOL * BLOCK, shared, WIDTH, dtype=dtype)
        order = torch.randperm(POOL, generator=torch.Generator().manual_seed(3)).tolist()
        self.tables = torch.full((batch, MOST), -1)
        for row, length in enumerate(lengths):
            blocks = [order.pop() for _ in range(-(-length // BLOCK))]
            self.tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.long)
            slots = [blocks[t // BLOCK] * BLOCK + t % BLOCK for t in range(length)]
            stored = random(2, length, shared, WIDTH, seed=row + 1).to(dtype)
            self.cache[LAYER][:, slots] = stored
        desk = self.desk = Desk()
        self.at = AttentionOperands(
            rank=0,
            layer=LAYER,
            q=desk.put(self.q.flatten(1)),
            cache=desk.put(self.cache),
            lengths=desk.put(whole_numbers(*lengths)),
            tables=desk.put(self.tables.int()),
            most_blocks=MOST,
            values=desk.put(unknown(batch, heads, spans, WIDTH)),
            lse=desk.put(unknown(batch, heads, spans)),
            width=WIDTH,
            scale=SCALE,
            window=-1 if window is None else window,
            block=BLOCK,
            spans=spans,
            planned=16,
            sequence_rows=sequence_rows,
            format=Format.of(dtype),
        )
        out = desk.put(unknown(batch, heads * WIDTH, dtype=dtype))
        self.merged = ReduceOperands(0, LAYER, self.at.values, self.at.lse, out, spans, WIDTH)

    def partials(self) -> list[PartialAttention]:
        heads = range(len(self.readers))
        runs = [
            (kv, Range(group[0], group[-1] + 1))
            for kv in range(max(self.readers) + 1)
            for group in [[head for head in heads if self.readers[head] == kv]]
        ]
        return [
            PartialAttention(self.at, Range(row, row + 1), kv, run, Range(span, span + 1))
            for row in range(len(self.lengths))
            for kv, run in runs
            for span in range(self.spans)
        ]

    def reduces(self, runs: Sequence[Range] = ()) -> list[AttentionReduce]:
        whole = [Range(0, len(self.readers))]
        return [
            AttentionReduce(self.merged, row, run)
            for row in range(len(self.lengths))
            for run in runs or whole
        ]

    def ran(self, runs: Sequence[Range] = ()) -> torch.Tensor:
        self.desk.run([*self.partials(), *self.reduces(runs)])
        return self.desk.tensors[self.merged.out].view(self.q.shape)

    def given(self) -> tuple[Any, ...]:
        lengths = torch.tensor(self.lengths)
        return (self.q, self.cache, self.tables, lengths, SCALE, self.window, LAYER, BLOCK)

    def expected(self) -> torch.Tensor:
        return cached_attention(*self.given(), self.readers)


@pytest.mark.parametrize("spans", [1, 2, 3, 7])
@pytest.mark.parametrize("readers", READERS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_as_the_op_for_any_number_of_spans(
    lengths: tuple[int, ...], readers: tuple[int, ...], spans: int
) -> None:
    """Traps 1, 7 and 8: heads read their own KV head, and only existing tokens."""
    work = Work(lengths, readers, spans)
    assert near(work.ran(), work.expected())


@pytest.mark.parametrize("window", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("spans", [1, 3])
def test_windows(spans: int, window: int) -> None:
    work = Work(LENGTHS[1], spans=spans, window=window)
    assert near(work.ran(), work.expected())


def test_gates_multiply_what_is_merged() -> None:
    """The value before the gate is not stored, and goes to the probe."""
    work = Work()
    gate = random(*work.q.flatten(1).shape, seed=9)
    work.merged = replace(work.merged, gate=work.desk.put(gate))
    gated, merged = work.ran().flatten(1), work.expected().flatten(1)
    assert near(work.desk.seen("ungated", *gate.shape), merged)
    assert torch.equal(work.desk.seen("attention", *gate.shape), gated)
    assert near(gated, merged * gate.sigmoid())


@pytest.mark.parametrize("spans", [2, 7])
def test_each_span_as_the_op(spans: int) -> None:
    """Empty spans give zeros and minus infinity."""
    work = Work(LENGTHS[1], spans=spans)
    work.desk.run(work.partials())
    values, lse = partial_attention(*work.given(), spans, work.readers)
    assert near(work.desk.tensors[work.at.values], values)
    actual = work.desk.tensors[work.at.lse]
    assert torch.equal(actual.isinf(), lse.isinf())
    assert near(actual.nan_to_num(neginf=0), lse.nan_to_num(neginf=0))


def test_the_same_bits_for_any_heads_and_any_others() -> None:
    work = Work(LENGTHS[1])
    whole = work.ran()
    assert torch.equal(Work(LENGTHS[1]).ran(cuts(5, 1, 4)), whole)
    for row in range(4):
        alone = Work(LENGTHS[1])
        partials = [partial for partial in alone.partials() if partial.sequences.start == row]
        alone.desk.run(
            [*partials, *(reduction for reduction in alone.reduces() if reduction.sequence == row)]
        )
        output = alone.desk.tensors[alone.merged.out].view(whole.shape)
        assert torch.equal(output[row], whole[row])
        assert output[[other for other in range(4) if other != row]].isnan().all()


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_the_same_bits_whichever_span_is_first(order: tuple[int, ...]) -> None:
    work = Work(LENGTHS[1])
    whole = Work(LENGTHS[1]).ran()
    partials = sorted(work.partials(), key=lambda partial: order[partial.span.start])
    work.desk.run([*partials, *work.reduces()])
    assert torch.equal(work.desk.tensors[work.merged.out].view(whole.shape), whole)


def test_a_run_of_spans_has_the_bits_of_its_spans() -> None:
    work = Work(LENGTHS[1])
    whole = Work(LENGTHS[1]).ran()
    runs = [Range(0, 2), Range(2, work.spans)]
    firsts = [partial for partial in work.partials() if not partial.span.start]
    work.desk.run([replace(partial, span=run) for partial in firsts for run in runs])
    work.desk.run(work.reduces())
    assert torch.equal(work.desk.tensors[work.merged.out].view(whole.shape), whole)


@pytest.mark.parametrize("runs", [(Range(0, 4),), (Range(0, 1), Range(1, 4))], ids=str)
def test_a_run_of_sequences_has_the_bits_of_its_sequences(runs: tuple[Range, ...]) -> None:
    work = Work(LENGTHS[1], sequence_rows=2)
    whole = Work(LENGTHS[1]).ran()
    firsts = [partial for partial in work.partials() if not partial.sequences.start]
    several = [replace(partial, sequences=run) for partial in firsts for run in runs]
    wanted = {Range(0, 4): Range(0, 4), Range(0, 1): Range(0, 2), Range(1, 4): Range(0, 4)}
    assert all(partial.together == wanted[partial.sequences] for partial in several)
    assert sum(partial.values for partial in several) == sum(
        partial.values for partial in work.partials()
    )
    work.desk.run([*several, *work.reduces()])
    assert torch.equal(work.desk.tensors[work.merged.out].view(whole.shape), whole)


def test_rows_of_a_sequence_read_its_tokens_once() -> None:
    alone, *_ = Work(LENGTHS[1], sequence_rows=2).partials()
    for stop, times in ((2, 1), (4, 2)):
        assert replace(alone, sequences=Range(0, stop)).traffic == times * alone.traffic


def test_trap_12_large_scores_do_not_overflow() -> None:
    """Scores in the hundreds stay finite, since the maximum is subtracted first."""
    work = Work(LENGTHS[1], size=300.0)
    assert float((work.q * SCALE).abs().max()) > 89
    output = work.ran()
    assert output.isfinite().all()
    assert near(output, work.expected(), 1e-4)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_trap_13_spans_that_may_hold_a_new_token_read_it(rows: int) -> None:
    """Of sequences with one row, only the last span does; else every span reads those of all."""
    lengths = (9, 16, 17, 2)
    work = Work(lengths, sequence_rows=rows)
    for partial in work.partials():
        boxes = [region.box[2:] for region in partial.reads if region.buffer == work.at.cache]
        sequences, head = partial.sequences, Range(partial.kv_head, partial.kv_head + 1)
        first = sequences.start // rows * rows
        new = [(Range(first, first + rows), head, (1, 2))]
        alone = rows == 1 and partial.span.stop < work.spans
        assert boxes == [(sequences, head, (0, 1)), *([] if alone else new)]
    newest = [
        int(work.tables[row, (n - 1) // BLOCK]) * BLOCK + (n - 1) % BLOCK
        for row, n in enumerate(lengths)
    ]
    whole = Work(lengths).ran()
    saved = work.cache[LAYER][:, newest].clone()
    work.cache[LAYER][:, newest] = torch.nan
    work.desk.run([partial for partial in work.partials() if partial.span.stop < work.spans])
    work.cache[LAYER][:, newest] = saved
    work.desk.run([partial for partial in work.partials() if partial.span.stop == work.spans])
    work.desk.run(work.reduces())
    assert torch.equal(work.desk.tensors[work.merged.out].view(whole.shape), whole)


def test_trap_26_it_waits_for_its_queries() -> None:
    work = Work()
    for partial in work.partials():
        operands, heads = work.at, partial.heads
        region = partial.reads[0]
        assert region.buffer == operands.q
        columns = (heads.start * WIDTH, heads.stop * WIDTH)
        assert region.box == (partial.sequences, columns)


def test_a_sequence_that_holds_nothing_comes_to_zero() -> None:
    work = Work((0, 5))
    output = work.ran()
    assert torch.equal(output[0], torch.zeros_like(output[0]))
    assert near(output[1], Work((5, 5)).expected()[0], 10) and output[1].isfinite().all()


@pytest.mark.parametrize("spans", [1, 3])
def test_what_it_shows(spans: int) -> None:
    work = Work(LENGTHS[1], spans=spans)
    output = work.ran()
    assert torch.equal(work.desk.seen("attention", 4, 5 * WIDTH), output.flatten(1))
    values = work.desk.seen("partial_values", 4, 5 * spans * WIDTH)
    assert torch.equal(values, work.desk.tensors[work.at.values].flatten(1))
    lse = work.desk.seen("partial_lse", 4, 5 * spans)
    assert torch.equal(lse, work.desk.tensors[work.at.lse].flatten(1))


def test_bf16_is_no_further_from_fp32_than_the_op() -> None:
    work = Work(LENGTHS[1], dtype=torch.bfloat16)
    rounded = work.expected()
    exact = Work(LENGTHS[1], dtype=torch.bfloat16)
    exact.q, exact.cache = exact.q.double(), exact.cache.double()
    truth = exact.expected()
    error, allowed = ((output.double() - truth).abs().mean() for output in (work.ran(), rounded))
    assert error <= 1.05 * allowed


def _merge_without_sum(partial: Any, other: Any, **functions: Any) -> Any:
    """Trap 12: the merge returns the maximum without the sum."""
    mixed, _ = RIGHT_MERGE(partial, other, **functions)
    return mixed, torch.maximum(partial[1], other[1])


def _merge_base_two(partial: Any, other: Any, **functions: Any) -> Any:
    """Trap 12: the log-sum-exp is written in base two, but read as natural."""
    mixed, lse = RIGHT_MERGE(partial, other, **functions)
    return mixed, lse / torch.log(torch.tensor(2.0))


def _merge_halves(partial: Any, other: Any, **functions: Any) -> Any:
    return (partial[0] + other[0]) / 2, other[1]


RIGHT_MERGE, RIGHT_SPAN = module.merge, module.span_of
MERGES = (_merge_without_sum, _merge_base_two, _merge_halves)


@pytest.mark.parametrize("mistake", MERGES, ids=lambda mistake: mistake.__name__)
def test_a_wrong_merge_is_seen(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., Any]
) -> None:
    monkeypatch.setattr(module, "merge", mistake)
    work = Work(LENGTHS[1], spans=7)
    assert not near(work.ran(), work.expected())


def _one_short(length: int, *args: Any) -> tuple[int, int]:
    first, last = RIGHT_SPAN(length, *args)
    return first, max(first, min(last, length - 1))


def _first_block_twice(length: int, *args: Any) -> tuple[int, int]:
    first, last = RIGHT_SPAN(length, *args)
    return max(0, first - BLOCK), last


@pytest.mark.parametrize(
    "mistake", [_one_short, _first_block_twice], ids=lambda mistake: mistake.__name__
)
def test_wrong_spans_are_seen(monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., Any]) -> None:
    monkeypatch.setattr(module, "span_of", mistake)
    work = Work(LENGTHS[1], spans=3)
    assert not near(work.ran(), work.expected())


@pytest.mark.parametrize(
    "changes", [{"scale": 1.0}, {"window": 3}, {"layer": 0}], ids=["scale", "window", "layer"]
)
def test_a_wrong_operand_is_seen(changes: dict[str, Any]) -> None:
    work = Work(LENGTHS[1])
    work.at = replace(work.at, **changes)
    assert not near(work.ran(), work.expected())


def test_trap_8_a_kv_head_by_habit() -> None:
    """Query heads assigned evenly to KV heads, although groups are uneven, are detected."""
    work = Work(LENGTHS[1], READERS[0])
    work.readers = (0, 0, 1, 1, 1)
    output = work.ran()
    work.readers = READERS[0]
    assert not near(output, work.expected())
