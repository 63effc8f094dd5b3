"""Attention equals a plain loop, and ranks hold the KV heads of their query heads."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.ranks import Operand, operand, random, refusal, refused, run
from tests.ir.strategies import EXAMPLES, intervals_of, layouts
from tpcompile.ir.layout import Layout, TokenLayout, even_runs
from tpcompile.ir.ops import ATTENTION
from tpcompile.ir.ops.attention import attend, causal_mask
from tpcompile.ir.plan import plan_heads
from tpcompile.ir.types import REPLICATE, Shard, ValueType

STARTS = operand(torch.tensor([0, 3, 4]))


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: list[int],
    scale: float,
    window: int | None,
    kv_heads: list[int],
) -> torch.Tensor:
    """Compute attention token by token and head by head, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for start, stop in pairwise(starts):
        for token in range(start, stop):
            first = start if window is None else max(start, token - window + 1)
            for head, shared in enumerate(kv_heads):
                scores = [
                    float(q[token, head] @ k[other, shared]) * scale
                    for other in range(first, token + 1)
                ]
                most = max(scores)
                weights = [math.exp(score - most) for score in scores]
                for weight, other in zip(weights, range(first, token + 1), strict=True):
                    out[token, head] += weight / sum(weights) * v[other, shared]
    return out.float()


@EXAMPLES
@given(st.data())
def test_the_reference_is_the_loop(data: st.DataObject) -> None:
    """The reference equals the loop for any packing, window and head mapping, without NaN."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    shared, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    heads = shared * group
    window = data.draw(st.none() | st.integers(1, 6))
    mapped = data.draw(
        st.none() | st.lists(st.integers(0, shared - 1), min_size=heads, max_size=heads)
    )
    starts = torch.tensor([0, *lengths]).cumsum(0)
    q = random(sum(lengths), heads, 4).whole
    k, v = (random(sum(lengths), shared, 4, seed=seed).whole for seed in (1, 2))
    output = ATTENTION(q, k, v, starts, 0.5, window, 0, mapped)
    read = mapped if mapped is not None else [head // group for head in range(heads)]
    expected = by_hand(q, k, v, starts.tolist(), 0.5, window, read)
    assert bool(torch.isfinite(output).all())
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("new", [1, 2, 7])
def test_the_last_tokens_of_a_sequence(new: int, window: int | None) -> None:
    """A suffix of a sequence attends to earlier tokens whose keys and values are given."""
    q, k, v = random(7, 4, 4).whole, random(7, 2, 4, seed=1).whole, random(7, 2, 4, seed=2).whole
    for kv_heads in (None, [0, 1, 1, 1]):
        whole = by_hand(q, k, v, [0, 7], 0.5, window, kv_heads or [0, 0, 1, 1])
        output = attend(q[-new:], k, v, 0.5, window, kv_heads)
        torch.testing.assert_close(output, whole[-new:], rtol=1e-5, atol=1e-5)


def test_large_scores_stay_finite() -> None:
    q, k, v = (random(4, 2, 8, seed=seed).whole * 1e4 for seed in range(3))
    assert bool(torch.isfinite(ATTENTION(q, k, v, STARTS.whole, 1.0, None, 0)).all())


def test_masks_are_boolean_and_every_token_sees_itself() -> None:
    for window in (None, 1, 3, 99):
        mask = causal_mask(5, 5, window, torch.device("cpu"))
        assert torch.equal(mask[3:], causal_mask(2, 5, window, torch.device("cpu")))
        assert mask.dtype == torch.bool
        assert bool(mask.diagonal().all())
        assert not bool(mask.triu(1).any())
        sees = mask.sum(1).tolist()
        assert sees == [min(token + 1, window or 5) for token in range(5)]


def heads_of(tokens: int, queries: int, keys: int) -> tuple[Operand, Operand, Operand]:
    return (
        random(tokens, queries, 4),
        random(tokens, keys, 4, seed=1),
        random(tokens, keys, 4, seed=2),
    )


SHAPES = [(h, k) for h in (1, 2, 6, 12, 14) for k in range(1, h + 1) if h % k == 0]


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_every_tp_of_the_plan_is_sound(queries: int, keys: int) -> None:
    """Uneven groups, shared KV heads and more ranks than KV heads are sound."""
    q, k, v = heads_of(4, queries, keys)
    for tp in range(1, queries + 1):
        plan = plan_heads(queries, keys, tp)
        split = (q.sharded(1, plan.queries), k.sharded(1, plan.keys), v.sharded(1, plan.keys))
        outcome = run(ATTENTION, *split, STARTS, 0.5, None, 0, ranks=tp)
        assert outcome.kind == split[0].kind
        outcome.assert_sound()
        run(ATTENTION, split[0], k, v, STARTS, 0.5, 2, 0, ranks=tp).assert_sound()


@EXAMPLES
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_any_layout_that_the_rule_takes_is_sound(
    data: st.DataObject, ranks: int, shared: int, group: int
) -> None:
    """Scattered, shared and permuted heads, and unused KV heads, are sound."""
    if shared * group < ranks:
        group = ranks
    q, k, v = heads_of(4, shared * group, shared)
    queries = data.draw(layouts(ranks, units=shared * group, grain=1, overlapping=True))
    more = st.sets(st.integers(0, shared - 1))
    parts = tuple(
        intervals_of({head // group for head in queries.units_of(rank)} | data.draw(more))
        for rank in range(ranks)
    )
    keys = Layout("kv_heads", shared, 1, parts)
    outcome = run(
        ATTENTION,
        q.sharded(1, queries),
        k.sharded(1, keys),
        v.sharded(1, keys),
        STARTS,
        0.5,
        None,
        0,
        ranks=ranks,
    )
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == Shard(1, queries)
    outcome.assert_sound()


def test_whole_heads_stay_whole() -> None:
    outcome = run(ATTENTION, *heads_of(4, 6, 2), STARTS, 0.5, None, 0, ranks=3)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == REPLICATE
    outcome.assert_sound(exact=True)


PLAN = plan_heads(6, 2, 4)
Q, K, V = heads_of(4, 6, 2)
SPLIT_Q, SPLIT_K, SPLIT_V = (
    Q.sharded(1, PLAN.queries),
    K.sharded(1, PLAN.keys),
    V.sharded(1, PLAN.keys),
)
REST = (STARTS, 0.5, None, 0)


def test_refuses_a_missing_kv_head() -> None:
    by_habit = Layout("kv_heads", 2, 1, tuple(((rank // 2, rank // 2 + 1),) for rank in range(4)))
    error = refused(
        "kv-heads", ATTENTION, SPLIT_Q, K.sharded(1, by_habit), V.sharded(1, by_habit), *REST
    )
    assert "rank 1" in error.got and "KV head 1" in error.expected
    assert "query heads read" in error.hint


def test_refuses_split_kv_heads_beside_whole_query_heads() -> None:
    refused("kv-heads", ATTENTION, Q, SPLIT_K, SPLIT_V, *REST)


def test_refuses_keys_and_values_placed_differently() -> None:
    refused("kv-alike", ATTENTION, SPLIT_Q, SPLIT_K, V, *REST)
    refused("kv-alike", ATTENTION, SPLIT_Q, K, SPLIT_V, *REST)
    refused("kv-alike", ATTENTION, Q, K, V.partial(), *REST)
    refused("kv-alike", ATTENTION, Q, K, random(4, 2, 8), *REST)


def test_refuses_sums_not_taken() -> None:
    refused("partial-nonlinear", ATTENTION, Q.partial(), K, V, *REST)
    refused("partial-nonlinear", ATTENTION, Q, K.partial(), V.partial(), *REST)


def test_refuses_what_is_split_elsewhere_than_by_head() -> None:
    width = Layout("width", 4, 1, even_runs(4, 2))
    refused("whole-heads", ATTENTION, Q.sharded(2, width), K, V, *REST)
    refused("whole-heads", ATTENTION, Q, K.sharded(2, width), V.sharded(2, width), *REST)
    tokens = [random(4, heads, 4, symbols=["T"]) for heads in (6, 2, 2)]
    split = [value.sharded(0, TokenLayout(2)) for value in tokens]
    refused("whole-heads", ATTENTION, split[0], *tokens[1:], *REST)
    refused("whole-heads", ATTENTION, tokens[0], *split[1:], *REST)


def test_refuses_shapes_that_do_not_fit() -> None:
    refused("attention", ATTENTION, random(4, 6, 8), K, V, *REST)
    refused("attention", ATTENTION, random(3, 6, 4), K, V, *REST)
    refused("attention", ATTENTION, random(4, 5, 4), K, V, *REST)


def test_refuses_dtypes_that_differ() -> None:
    half = (operand(value.whole.bfloat16()) for value in (K, V))
    refused("attention", ATTENTION, Q, *half, *REST)
    starts = operand(STARTS.whole.float(), ["S"])
    refused("attention", ATTENTION, Q, K, V, starts, 0.5, None, 0)


def test_refuses_heads_without_tokens() -> None:
    refused("attention", ATTENTION, random(4, 4), random(4, 4), random(4, 4), *REST)


def test_refuses_starts_of_some_sequences() -> None:
    starts = operand(STARTS.whole, ["S"]).sharded(0, TokenLayout(2, "S"))
    refused("attention", ATTENTION, Q, K, V, starts, 0.5, None, 0)


def test_refuses_a_map_of_heads_in_the_graph() -> None:
    refused("kv-map", ATTENTION, Q, K, V, *REST, [0, 0, 0, 1, 1, 1])


def test_refuses_a_window_that_sees_nothing() -> None:
    """A window in which a token does not see itself is refused, since it selects nothing."""
    for window in (0, -1):
        refused("attention", ATTENTION, Q, K, V, STARTS, 0.5, window, 0)


def test_heads_counted_in_pairs_are_sound_or_refused() -> None:
    """With units of two heads, unit numbers are not head numbers: sound, or refused."""
    queries = Layout("q_heads", 3, 2, even_runs(3, 3))
    right = Layout("kv_heads", 2, 1, (((0, 1),), ((0, 2),), ((1, 2),)))
    lacking = Layout("kv_heads", 2, 1, (((0, 1),), ((0, 1),), ((0, 2),)))
    for layout in (right, lacking):
        operands = (Q.sharded(1, queries), K.sharded(1, layout), V.sharded(1, layout), *REST)
        if refusal(ATTENTION, *operands) is None:
            run(ATTENTION, *operands, ranks=3).assert_sound()
