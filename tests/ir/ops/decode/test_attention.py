"""Decode attention, whole or in spans, equals attention over the history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.ranks import Operand, infer, operand, random, refused, run
from tests.ir.strategies import EXAMPLES
from tpcompile.ir.layout import Layout, TokenLayout, even_runs
from tpcompile.ir.ops import ATTENTION_REDUCE, CACHED_ATTENTION, PARTIAL_ATTENTION
from tpcompile.ir.ops.decode import merge_spans, span_of
from tpcompile.ir.plan import plan_heads
from tpcompile.ir.roles import CacheOf, QueriesOf, SpansOf
from tpcompile.ir.types import Shard, ValueType

WIDTH, SCALE, LAYERS, LAYER = 4, 0.5, 3, 1
SPANS = (1, 2, 3, 7)


@dataclass
class Decode:
    """Sequences in scattered cache blocks; all other slots are NaN."""

    lengths: Sequence[int]
    block: int
    heads: int = 4
    shared: int = 2
    window: int | None = None
    kv_heads: Sequence[int] | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        counts = [-(-length // self.block) for length in self.lengths]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(7))
        free = order.tolist()
        held = [[free.pop() for _ in range(count)] for count in counts]
        widest = max(counts) + 1
        self.tables = torch.tensor([[*table, *[-1] * (widest - len(table))] for table in held])
        shape = (LAYERS, 2, len(order) * self.block, self.shared, WIDTH)
        self.cache = torch.full(shape, torch.nan)
        self.histories = [
            random(length, 2, self.shared, WIDTH, seed=seed).whole
            for seed, length in enumerate(self.lengths)
        ]
        for blocks, history in zip(held, self.histories, strict=True):
            for token, entry in enumerate(history):
                slot = blocks[token // self.block] * self.block + token % self.block
                self.cache[LAYER, :, slot] = entry
        self.q = random(len(self.lengths), self.heads, WIDTH, seed=99).whole * self.factor

    @property
    def places(self) -> tuple[Any, ...]:
        lengths = torch.tensor(self.lengths)
        return self.cache, self.tables, lengths, SCALE, self.window, LAYER, self.block

    def whole(self) -> torch.Tensor:
        output: torch.Tensor = CACHED_ATTENTION(self.q, *self.places, self.kv_heads)
        return output

    def partial(self, spans: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, lse = PARTIAL_ATTENTION(self.q, *self.places, spans, self.kv_heads)
        return values, lse

    def split(self, spans: int) -> torch.Tensor:
        output: torch.Tensor = ATTENTION_REDUCE(*self.partial(spans), torch.float32)
        return output

    def scores(self, row: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each head's scores for a range of tokens, and the values, in fp64."""
        group = self.heads // self.shared
        read = self.kv_heads or [head // group for head in range(self.heads)]
        k, v = self.histories[row][first:last][:, :, read].double().unbind(1)
        return torch.einsum("hw,thw->ht", self.q[row].double(), k) * SCALE, v

    def expected(self) -> torch.Tensor:
        rows = []
        for row, length in enumerate(self.lengths):
            first = 0 if self.window is None else max(0, length - self.window)
            scores, v = self.scores(row, first, length)
            rows.append(torch.einsum("ht,thw->hw", scores.softmax(-1), v))
        return torch.stack(rows).float()


@EXAMPLES
@given(st.data())
def test_any_history_in_any_spans(data: st.DataObject) -> None:
    shared, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    heads = shared * group
    mapped = st.lists(st.integers(0, shared - 1), min_size=heads, max_size=heads)
    decode = Decode(
        lengths=data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)),
        block=data.draw(st.integers(1, 4)),
        heads=heads,
        shared=shared,
        window=data.draw(st.none() | st.integers(1, 8)),
        kv_heads=data.draw(st.none() | mapped),
    )
    torch.testing.assert_close(decode.whole(), decode.expected(), rtol=1e-5, atol=1e-5)
    output = decode.split(data.draw(st.integers(1, 7)))
    torch.testing.assert_close(output, decode.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 40])
def test_spans_are_whole_blocks_and_the_last_has_the_new_token(
    length: int, spans: int, block: int
) -> None:
    bounds = [span_of(length, block, span, spans, None) for span in range(spans)]
    assert bounds[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(first % block == 0 for first, _ in bounds)
    first, last = bounds[-1]
    assert first < last == length
    counts = [-(-last // block) - first // block for first, last in bounds]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("window", [1, 3, 4, 100])
@pytest.mark.parametrize("spans", SPANS)
def test_spans_of_a_window_cover_it_once(spans: int, window: int) -> None:
    ranges = [range(*span_of(11, 4, span, spans, window)) for span in range(spans)]
    tokens = [token for span in ranges for token in span]
    assert tokens == list(range(max(0, 11 - window), 11))
    assert 10 in ranges[-1]


@pytest.mark.parametrize("factor", [1.0, 1e4])
@pytest.mark.parametrize("window", [None, 3])
def test_a_span_tells_its_values_and_its_log_sum_exp(window: int | None, factor: float) -> None:
    """Trap 12: log-sum-exps are natural, and finite for scores in the thousands."""
    decode = Decode([1, 6, 11], block=2, window=window, factor=factor)
    values, lse = decode.partial(3)
    assert (values.shape, lse.shape) == ((3, 4, 3, WIDTH), (3, 4, 3))
    assert values.dtype == lse.dtype == torch.float32
    for row, length in enumerate(decode.lengths):
        for span in range(3):
            first, last = span_of(length, 2, span, 3, window)
            if first == last:
                assert bool((lse[row, :, span] == -torch.inf).all())
                assert not values[row, :, span].any()
                continue
            scores, v = decode.scores(row, first, last)
            mixed = torch.einsum("ht,thw->hw", scores.softmax(-1), v).float()
            torch.testing.assert_close(values[row, :, span], mixed, rtol=1e-4, atol=1e-4)
            wanted = scores.logsumexp(-1).float()
            torch.testing.assert_close(lse[row, :, span], wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decode.split(3), decode.expected(), rtol=1e-4, atol=1e-4)


def test_only_the_last_span_owns_the_new_token() -> None:
    """Trap 13: only the last span reads the new token, so only it waits for the new keys."""
    decode = Decode([1, 4, 5, 9], block=4)
    before = decode.partial(3)
    for row, length in enumerate(decode.lengths):
        last = int(decode.tables[row, (length - 1) // 4]) * 4 + (length - 1) % 4
        decode.cache[LAYER, :, last] += 1
    for old, new in zip(before, decode.partial(3), strict=True):
        assert torch.equal(old[:, :, :2], new[:, :, :2])
        assert not bool((old[:, :, 2] == new[:, :, 2]).flatten(1).all(1).any())


def spans_of(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return random(2, count, WIDTH, seed=seed).whole, random(2, count, seed=seed + 1).whole * 40


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("cut", [1, 2])
def test_what_is_merged_may_be_merged_on(count: int, cut: int) -> None:
    """Trap 12: an intermediate merge returns its log-sum-exp, so its result can be merged again."""
    values, lse = spans_of(count + 1)
    lse[0, 0] = -torch.inf
    weights = lse.softmax(-1)
    expected = torch.einsum("rs,rsw->rw", weights, values)
    parts = [merge_spans(values[:, part], lse[:, part]) for part in (slice(cut), slice(cut, None))]
    mixed, total = merge_spans(*(torch.stack(side, 1) for side in zip(*parts, strict=True)))
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, lse.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_neighbours_merge_first() -> None:
    """Spans are merged in a fixed tree, so the bits are the same for all callers."""
    values, lse = spans_of(5)
    lse = lse / 40  # weights of similar size, so that each span affects the last bits

    def merged(*places: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sides = [
            (values[:, place], lse[:, place]) if isinstance(place, int) else place
            for place in places
        ]
        return merge_spans(*(torch.stack(side, 1) for side in zip(*sides, strict=True)))

    by_hand = merged(merged(merged(0, 1), merged(2, 3)), 4)
    for actual, expected in zip(merge_spans(values, lse), by_hand, strict=True):
        assert torch.equal(actual, expected)


def test_an_empty_span_changes_no_bit() -> None:
    values, lse = spans_of(1)
    nothing = torch.zeros_like(values), torch.full_like(lse, -torch.inf)
    for sides in (((values, lse), nothing), (nothing, (values, lse))):
        mixed, total = merge_spans(*(torch.cat(side, 1) for side in zip(*sides, strict=True)))
        assert torch.equal(mixed, values[:, 0]) and torch.equal(total, lse[:, 0])
    mixed, total = merge_spans(*(torch.cat([side, side], 1) for side in nothing))
    assert not mixed.any() and bool((total == -torch.inf).all())


def test_a_token_that_sees_nothing_is_refused() -> None:
    values, lse = random(2, 3, 2, WIDTH).whole, random(2, 3, 2).whole
    lse[1, 2] = -torch.inf
    with pytest.raises(ValueError, match="all spans of a token are empty"):
        ATTENTION_REDUCE(values, lse, torch.float32)


def test_the_result_has_memory_and_dtype_of_its_own() -> None:
    values, lse = random(2, 3, 1, WIDTH).whole, random(2, 3, 1).whole
    output = ATTENTION_REDUCE(values, lse, torch.float32)
    assert output.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
    assert torch.equal(output, values[:, :, 0])
    assert ATTENTION_REDUCE(values, lse, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("target", [CACHED_ATTENTION, PARTIAL_ATTENTION], ids=str)
def test_steps_of_other_than_one_token_each_are_refused(target: Any) -> None:
    decode = Decode([5, 3], block=2)
    options = (SCALE, None, LAYER, 2, *([2] if target is PARTIAL_ATTENTION else []))
    two = torch.tensor([5, 3])
    with pytest.raises(ValueError, match="3 new tokens for 2 sequences"):
        target(random(3, 4, WIDTH).whole, decode.cache, decode.tables, two, *options)
    with pytest.raises(ValueError, match="2 new tokens for 1 sequences"):
        target(decode.q, decode.cache, decode.tables, two[:1], *options)
    with pytest.raises(ValueError, match="a length of at least 1, got 0"):
        target(decode.q, decode.cache, decode.tables, torch.tensor([5, 0]), *options)


@pytest.mark.parametrize("wrong", [-1, 400], ids=str)
@pytest.mark.parametrize("target", [CACHED_ATTENTION, PARTIAL_ATTENTION], ids=str)
def test_blocks_that_are_not_there_are_refused(target: Any, wrong: int) -> None:
    decode = Decode([5], block=2)
    options = (SCALE, None, LAYER, 2, *([2] if target is PARTIAL_ATTENTION else []))
    with pytest.raises(ValueError, match=r"must contain tokens \d to 5 and be in the cache"):
        target(decode.q, decode.cache, decode.tables[:, :2], torch.tensor([5]), *options)
    decode.tables[0, 2] = wrong
    with pytest.raises(ValueError, match=r"must contain tokens \d to 5 and be in the cache"):
        target(decode.q, decode.cache, decode.tables, torch.tensor([5]), *options)


# Across ranks.

PLACES = (
    operand(torch.tensor([[3, 1, -1], [0, 2, -1]])),
    operand(torch.tensor([3, 4])),
)
REST = (SCALE, None, LAYER, 2)


def heads(queries: int, keys: int) -> tuple[Operand, Operand]:
    q, cache = random(2, queries, WIDTH), random(LAYERS, 2, 8, keys, WIDTH, seed=3)
    return q.in_role(QueriesOf(LAYER, 2)), cache.in_role(CacheOf(2))


def spans_in_role(values: Operand, lse: Operand) -> list[Operand]:
    """Mark values as the two results of a partial_attention with three spans."""
    sides = zip(("values", "lse"), (values, lse), strict=True)
    return [side.in_role(SpansOf(part, LAYER, 2, 3)) for part, side in sides]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (6, 2), (12, 2), (14, 2), (8, 4), (6, 6)])
def test_every_tp_of_the_plan_is_sound(queries: int, keys: int) -> None:
    """Uneven groups, shared KV heads and more ranks than KV heads are sound."""
    for tp in range(1, queries + 1):
        plan = plan_heads(queries, keys, tp)
        q, cache = heads(queries, keys)
        split = (q.sharded(1, plan.queries), cache.sharded(3, plan.keys))
        outcome = run(CACHED_ATTENTION, *split, *PLACES, *REST, ranks=tp)
        assert isinstance(outcome.kind, ValueType)
        assert outcome.kind.placement == Shard(1, plan.queries)
        outcome.assert_sound()
        partial = run(PARTIAL_ATTENTION, *split, *PLACES, *REST, 2, ranks=tp)
        assert isinstance(partial.kind, tuple)
        assert {kind.placement for kind in partial.kind} == {Shard(1, plan.queries)}
        partial.assert_sound()
        values, lse = (
            side.sharded(1, plan.queries)
            for side in spans_in_role(random(2, queries, 3, WIDTH), random(2, queries, 3))
        )
        reduced = run(ATTENTION_REDUCE, values, lse, torch.float32, ranks=tp)
        assert isinstance(reduced.kind, ValueType)
        assert reduced.kind.placement == Shard(1, plan.queries)
        reduced.assert_sound()


def even_layout(units: int, grain: int = 1) -> Layout:
    return Layout("q_heads", units, grain, even_runs(units, 2))


Q, CACHE = heads(6, 2)
REFUSALS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "a split head": ("whole-heads", (Q.sharded(2, even_layout(4)), CACHE, *PLACES, *REST)),
    "rows of heads": (
        "whole-heads",
        (Q.sharded(1, even_layout(3, 2)), CACHE, *PLACES, *REST),
    ),
    "a KV head on another rank": (
        "kv-heads",
        (
            Q.sharded(1, Layout("q_heads", 6, 1, (((0, 4),), ((4, 6),)))),
            CACHE.sharded(3, Layout("kv_heads", 2, 1, (((0, 1),), ((1, 2),)))),
            *PLACES,
            *REST,
        ),
    ),
    "a cache split by slot": (
        "kv-cache",
        (Q, CACHE.sharded(2, even_layout(8)), *PLACES, *REST),
    ),
    "a partial cache": ("kv-cache", (Q, CACHE.partial(), *PLACES, *REST)),
    "a cache of one side": ("kv-cache", (Q, random(3, 1, 8, 2, WIDTH), *PLACES, *REST)),
    "queries of another dtype": (
        "kv-cache",
        (operand(Q.whole.bfloat16()), CACHE, *PLACES, *REST),
    ),
    "a layer out of range": ("kv-cache", (Q, CACHE, *PLACES, SCALE, None, 3, 2)),
    "empty blocks": ("kv-cache", (Q, CACHE, *PLACES, SCALE, None, 1, 0)),
    "an empty window": ("attention", (Q, CACHE, *PLACES, SCALE, 0, 1, 2)),
    "partial queries": ("partial-nonlinear", (Q.partial(), CACHE, *PLACES, *REST)),
    "lengths of other sequences": (
        "kv-cache",
        (Q, CACHE, PLACES[0], operand(torch.tensor([3, 4, 1])), *REST),
    ),
    "lengths that are not integers": (
        "kv-cache",
        (Q, CACHE, PLACES[0], random(2), *REST),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    rule, operands = REFUSALS[name]
    refused(rule, CACHED_ATTENTION, *operands)
    refused(rule, PARTIAL_ATTENTION, *operands, 2)


def test_refuses_no_span() -> None:
    refused("spans", PARTIAL_ATTENTION, Q, CACHE, *PLACES, *REST, 0)


VALUES, LSE = random(2, 6, 3, WIDTH), random(2, 6, 3)
HEADS = even_layout(6)


@pytest.mark.parametrize(
    ("rule", "values", "lse"),
    [
        ("spans", VALUES, random(2, 6, 2)),
        ("spans", random(2, 6, WIDTH), LSE),
        ("spans", operand(VALUES.whole.bfloat16()), LSE),
        ("partial-nonlinear", VALUES.partial(), LSE),
        ("partial-nonlinear", VALUES, LSE.partial()),
        ("whole-axis", VALUES.sharded(2, Layout("spans", 3, 1, (((0, 2),), ((2, 3),)))), LSE),
        ("same-layout", VALUES.sharded(1, HEADS), LSE),
        ("same-layout", VALUES.sharded(3, even_layout(4)), LSE),
    ],
)
def test_refuses_spans_that_cannot_be_merged(rule: str, values: Operand, lse: Operand) -> None:
    refused(rule, ATTENTION_REDUCE, values, lse, torch.float32)


def test_tokens_split_between_ranks_stay_so() -> None:
    values, lse = (
        random(4, 6, 3, *more, symbols=["T"]).sharded(0, TokenLayout(2)) for more in ([WIDTH], [])
    )
    values, lse = spans_in_role(values, lse)
    run(ATTENTION_REDUCE, values, lse, torch.float32, ranks=2).assert_sound()


ROLES: dict[str, tuple[Any, ...]] = {
    "queries of another layer": (Q.in_role(QueriesOf(0, 2)), CACHE, *PLACES, *REST),
    "queries of no layer": (random(2, 6, WIDTH), CACHE, *PLACES, *REST),
    "a reader of another layer": (Q, CACHE, *PLACES, SCALE, None, 0, 2),
    "a reader of other blocks": (Q, CACHE, *PLACES, SCALE, None, LAYER, 4),
    "a layer of other blocks": (
        Q.in_role(QueriesOf(LAYER, 4)), CACHE, *PLACES, SCALE, None, LAYER, 4
    ),
    "a cache without blocks": (Q, Operand(CACHE.whole, CACHE.kind.in_role(None)), *PLACES, *REST),
}  # fmt: skip


@pytest.mark.parametrize("name", ROLES)
def test_attention_reads_what_its_own_step_kept(name: str) -> None:
    infer(CACHED_ATTENTION, Q, CACHE, *PLACES, *REST)
    refused("kv-cache", CACHED_ATTENTION, *ROLES[name])
    refused("kv-cache", PARTIAL_ATTENTION, *ROLES[name], 2)


@pytest.mark.parametrize(
    ("values", "lse"),
    [
        (SpansOf("values", 0, 2, 3), SpansOf("lse", 1, 2, 3)),
        (SpansOf("values", 1, 2, 3), SpansOf("lse", 1, 4, 3)),
        (SpansOf("values", 1, 2, 3), SpansOf("lse", 1, 2, 2)),
        (SpansOf("values", 1, 2, 6), SpansOf("lse", 1, 2, 6)),
        (SpansOf("lse", 1, 2, 3), SpansOf("lse", 1, 2, 3)),
        (None, None),
    ],
    ids=str,
)
def test_spans_merge_with_their_own_weights(values: Any, lse: Any) -> None:
    """Partials are merged only if they are all the spans of one attention."""
    infer(ATTENTION_REDUCE, *spans_in_role(VALUES, LSE), torch.float32)
    refused("spans", ATTENTION_REDUCE, VALUES.in_role(values), LSE.in_role(lse), torch.float32)


def test_an_op_that_knows_no_role_takes_none() -> None:
    values, lse = spans_in_role(VALUES, LSE)
    for known in (Q, CACHE, values, lse):
        refused("role", torch.ops.aten.clone.default, known)
        refused("role", torch.ops.aten.cat.default, [VALUES, known], 0)
