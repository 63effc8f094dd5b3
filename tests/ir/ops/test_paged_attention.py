"""Attention over a paged cache equals attention over the whole history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.ranks import Operand, operand, random, refused, run
from tests.ir.strategies import EXAMPLES
from tpcompile.ir.layout import Layout, TokenLayout, even_runs
from tpcompile.ir.ops import ATTENTION, PAGED_ATTENTION, SPECS
from tpcompile.ir.plan import plan_heads
from tpcompile.ir.roles import CacheOf
from tpcompile.ir.types import REPLICATE, Shard, ValueType

WIDTH, SCALE, LAYERS, LAYER = 4, 0.5, 3, 1
K, V = 1, 2


@dataclass
class Kept:
    """A cache and its growing sequences, as a model would use them."""

    block: int
    blocks: list[int]
    """Free blocks, in the order of allocation."""
    heads: int
    shared: int
    window: int | None = None
    kv_heads: Sequence[int] | None = None
    tables: list[list[int]] = field(default_factory=list)
    histories: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        slots = (max(self.blocks) + 1) * self.block
        self.cache = torch.full((LAYERS, 2, slots, self.shared, WIDTH), torch.nan)
        self._seed = 0

    def step(self, new: Sequence[int]) -> torch.Tensor:
        """Append new tokens to each sequence through the cache."""
        while len(self.tables) < len(new):
            self.tables.append([])
            self.histories.append([random(0, n, WIDTH).whole for n in self._heads()])
        fresh = [self._fresh(count) for count in new]
        slots = []
        for row, (count, values) in enumerate(zip(new, fresh, strict=True)):
            length = len(self.histories[row][K])
            for token in range(length, length + count):
                if token == len(self.tables[row]) * self.block:
                    self.tables[row].append(self.blocks.pop(0))
                slots.append(
                    self.tables[row][token // self.block] * self.block + token % self.block
                )
            pairs = zip(self.histories[row], values, strict=True)
            self.histories[row] = [torch.cat([old, value]) for old, value in pairs]
        width = max(map(len, self.tables)) + 1
        padded = [[*table, *[-1] * (width - len(table))] for table in self.tables]
        packed = [torch.cat(side) for side in zip(*fresh, strict=True)]
        starts = torch.tensor([0, *new]).cumsum(0)
        lengths = torch.tensor([len(history[K]) for history in self.histories])
        places = (starts, torch.tensor(slots, dtype=torch.long), torch.tensor(padded), lengths)
        output: torch.Tensor = PAGED_ATTENTION(
            *packed, self.cache, *places, SCALE, self.window, LAYER, self.block, self.kv_heads
        )
        return output

    def expected(self, new: Sequence[int]) -> torch.Tensor:
        """Return the expected attention rows of the new tokens, from the whole histories."""
        rows = []
        for count, history in zip(new, self.histories, strict=True):
            length = len(history[K])
            starts = torch.tensor([0, length])
            whole = ATTENTION(*history, starts, SCALE, self.window, LAYER, self.kv_heads)
            rows.append(whole[length - count :])
        return torch.cat(rows)

    def _heads(self) -> tuple[int, int, int]:
        return self.heads, self.shared, self.shared

    def _fresh(self, count: int) -> list[torch.Tensor]:
        self._seed += 3
        heads = enumerate(self._heads())
        return [random(count, n, WIDTH, seed=self._seed + side).whole for side, n in heads]


@EXAMPLES
@given(st.data())
def test_any_history_in_any_blocks(data: st.DataObject) -> None:
    """A step may mix prefill, decode, chunks and idle sequences, in scattered blocks amid NaN."""
    shared, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    heads = shared * group
    mapped = st.lists(st.integers(0, shared - 1), min_size=heads, max_size=heads)
    model = Kept(
        block=data.draw(st.integers(1, 4)),
        blocks=data.draw(st.permutations(range(60))),
        heads=heads,
        shared=shared,
        window=data.draw(st.none() | st.integers(1, 8)),
        kv_heads=data.draw(st.none() | mapped),
    )
    sequences = data.draw(st.integers(1, 3))
    new = st.lists(st.integers(0, 5), min_size=sequences, max_size=sequences).filter(any)
    for counts in data.draw(st.lists(new, min_size=1, max_size=4)):
        output = model.step(counts)
        torch.testing.assert_close(output, model.expected(counts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("blocks", [[2, 3, 4], [3, 1, 2], [0, 2, 1]], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("new", [1, 3])
def test_blocks_behind_each_other_and_scattered(
    blocks: list[int], window: int | None, new: int
) -> None:
    model = Kept(4, list(blocks), heads=4, shared=2, window=window)
    model.step([7])
    torch.testing.assert_close(model.step([new]), model.expected([new]), rtol=1e-5, atol=1e-5)


def test_only_the_new_tokens_are_kept_and_only_in_their_layer() -> None:
    """Traps 7 and 14: unrepeated KV heads of the new tokens are written, in their layer only."""
    model = Kept(4, [1, 0, 2], heads=6, shared=2)
    model.step([5])
    before = model.cache.clone()
    model.step([2])
    for layer in (0, 2):
        assert bool(model.cache[layer].isnan().all())
    slots = [4, 5, 6, 7, 0, 1, 2]
    assert torch.equal(model.cache[LAYER, 0, slots], model.histories[0][K])
    assert torch.equal(model.cache[LAYER, 1, slots], model.histories[0][V])
    other_slots = [slot for slot in range(12) if slot not in slots]
    assert bool(model.cache[LAYER, :, other_slots].isnan().all())
    assert torch.equal(model.cache[LAYER, :, slots[:5]], before[LAYER, :, slots[:5]])


def test_a_new_token_sees_itself_first_in_its_block() -> None:
    """Trap 13: a token that opens a block is written before it is read."""
    model = Kept(4, [2, 0], heads=2, shared=2)
    model.step([4])
    output = model.step([1])
    assert bool(torch.isfinite(output).all())
    torch.testing.assert_close(output, model.expected([1]), rtol=1e-5, atol=1e-5)


def test_large_scores_stay_finite() -> None:
    """Trap 12: the maximum is subtracted before the exponential."""
    model = Kept(2, [4, 1, 3, 0], heads=2, shared=1)
    model.step([5])
    model.cache.mul_(1e4)
    for new in (1, 2):
        assert bool(torch.isfinite(model.step([new])).all())


def _reads(monkeypatch: pytest.MonkeyPatch, model: Kept) -> list[bool]:
    """Return a list that records whether keys and values are views of the cache."""
    import importlib

    module = importlib.import_module("tpcompile.ir.ops.paged_attention")
    views: list[bool] = []
    attend = module.attend

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> torch.Tensor:
        storage = model.cache.untyped_storage().data_ptr()
        views.extend(side.untyped_storage().data_ptr() == storage for side in (k, v))
        result: torch.Tensor = attend(q, k, v, *options)
        return result

    monkeypatch.setattr(module, "attend", watched)
    return views


@pytest.mark.parametrize(("blocks", "window", "in_place"), [
    ([2, 3, 4], None, True),
    ([2, 4, 3], None, False),
    ([4, 2, 3], None, False),
    ([4, 2, 3], 5, True),
], ids=str)  # fmt: skip
def test_blocks_in_a_row_are_read_in_place(
    blocks: list[int], window: int | None, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contiguous blocks are read in place; with a window, only blocks within it matter."""
    model = Kept(4, list(blocks), heads=2, shared=1, window=window)
    model.step([9])
    views = _reads(monkeypatch, model)
    model.step([1])
    assert views == [in_place, in_place]


def test_a_prefill_reads_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Kept(4, [3, 1, 0], heads=2, shared=1)
    views = _reads(monkeypatch, model)
    model.step([6, 3])
    assert views == [False] * 4


Q6, K2, V2 = SIX = (
    random(4, 6, WIDTH),
    random(4, 2, WIDTH, seed=1),
    random(4, 2, WIDTH, seed=2),
)
CACHE = random(LAYERS, 2, 8, 2, WIDTH, seed=3).in_role(CacheOf(2))
PLACES = (
    operand(torch.tensor([0, 1, 4])),
    operand(torch.tensor([6, 0, 1, 2])),
    operand(torch.tensor([[1, 2, 3], [0, -1, -1]])),
    operand(torch.tensor([5, 3])),
)
"""One token after four others, and three that begin a sequence."""
REST = (SCALE, None, LAYER, 2)


def fresh_cache() -> Operand:
    """Return a copy of the cache, since the op writes to it."""
    return Operand(CACHE.whole.clone(), CACHE.kind)


def heads(queries: int, keys: int) -> list[Operand]:
    return [
        random(4, queries, WIDTH),
        random(4, keys, WIDTH, seed=1),
        random(4, keys, WIDTH, seed=2),
        random(LAYERS, 2, 8, keys, WIDTH, seed=3).in_role(CacheOf(2)),
    ]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (6, 2), (12, 2), (14, 2), (8, 4), (6, 6)])
def test_every_tp_of_the_plan_is_sound(queries: int, keys: int) -> None:
    """Uneven groups, shared KV heads and more ranks than KV heads are sound."""
    for tp in range(1, queries + 1):
        plan = plan_heads(queries, keys, tp)
        q, k, v, cache = heads(queries, keys)
        k, v = (side.sharded(1, plan.keys) for side in (k, v))
        split = (q.sharded(1, plan.queries), k, v, cache.sharded(3, plan.keys))
        outcome = run(PAGED_ATTENTION, *split, *PLACES, *REST, ranks=tp)
        assert isinstance(outcome.kind, ValueType)
        assert outcome.kind.placement == Shard(1, plan.queries)
        outcome.assert_sound()


def test_whole_heads_stay_whole() -> None:
    outcome = run(PAGED_ATTENTION, *SIX, fresh_cache(), *PLACES, *REST, ranks=2)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == REPLICATE
    outcome.assert_sound(exact=True)


def test_its_cost_is_that_of_a_token_of_context() -> None:
    kinds = [value.kind for value in (*SIX, CACHE)]
    cost = SPECS[PAGED_ATTENTION].cost(Q6.kind, kinds, 0)
    assert cost.wire_bytes == 0
    assert cost == SPECS[ATTENTION].cost(Q6.kind, kinds[:3], 0)


def refused_cache(cache: Operand, rule: str = "kv-cache") -> str:
    return refused(rule, PAGED_ATTENTION, *SIX, cache, *PLACES, *REST).expected


def test_refuses_a_cache_of_other_keys() -> None:
    """Trap 7 is among the refusals: a cache with one head per query head."""
    for shape in ((3, 2, 8, 6, 4), (3, 2, 8, 2, 8), (3, 1, 8, 2, 4), (2, 8, 2, 4)):
        assert "to match the keys" in refused_cache(random(*shape))
    assert "to match the keys" in refused_cache(operand(CACHE.whole.bfloat16()))


def test_refuses_a_cache_that_lies_otherwise_than_the_keys() -> None:
    plan = plan_heads(6, 2, 4)
    q, k, v = Q6.sharded(1, plan.queries), K2.sharded(1, plan.keys), V2.sharded(1, plan.keys)
    habit = Layout("kv_heads", 2, 1, tuple(((rank // 2, rank // 2 + 1),) for rank in range(4)))
    slots = Layout("slots", 8, 1, even_runs(8, 4))
    two_slots = random(LAYERS, 2, 2, 2, WIDTH).sharded(2, plan.keys)
    for cache in (CACHE, CACHE.sharded(3, habit), CACHE.sharded(2, slots), two_slots):
        error = refused("kv-cache", PAGED_ATTENTION, q, k, v, cache, *PLACES, *REST)
        assert "the same layout as the keys" in error.expected
    run(PAGED_ATTENTION, q, k, v, fresh_cache().sharded(3, plan.keys), *PLACES, *REST, ranks=4)
    assert "the same layout as the keys" in refused_cache(CACHE.sharded(3, plan.keys))
    assert "sharded by head or replicated" in refused_cache(CACHE.partial())


@pytest.mark.parametrize("layer", [-1, 3])
def test_refuses_a_layer_that_the_cache_has_not(layer: int) -> None:
    places = (*PLACES, SCALE, None, layer, 2)
    error = refused("kv-cache", PAGED_ATTENTION, *SIX, CACHE, *places)
    assert error.expected == "one of 3 layers"


def test_refuses_a_block_without_tokens() -> None:
    for block in (0, -1):
        places = (*PLACES, SCALE, None, LAYER, block)
        error = refused("kv-cache", PAGED_ATTENTION, *SIX, CACHE, *places)
        assert "a block of one token" in error.expected


@pytest.mark.parametrize("place", [1, 2, 3])
def test_refuses_places_that_a_rank_does_not_know(place: int) -> None:
    extent, *_ = PLACES[place].kind.shape
    assert isinstance(extent, int)
    if extent % 2 == 0:
        split = PLACES[place].sharded(0, Layout("tokens", extent, 1, even_runs(extent, 2)))
        _refused_place(place, split, "on every rank")
    _refused_place(place, operand(PLACES[place].whole.int()), "i64")


def test_refuses_places_for_other_tokens_or_sequences() -> None:
    _refused_place(1, operand(torch.tensor([0, 1, 2])), "one slot per new token")
    _refused_place(2, operand(torch.tensor([1, 2])), "one row per sequence")
    _refused_place(3, operand(torch.tensor([5, 3, 1])), "one row per sequence")


def _refused_place(place: int, other: Operand, expected: str) -> None:
    places = list(PLACES)
    places[place] = other
    error = refused("kv-cache", PAGED_ATTENTION, *SIX, CACHE, *places, *REST)
    assert expected in error.expected


def test_refuses_what_attention_refuses() -> None:
    tokens = random(4, 6, WIDTH, symbols=["T"]).sharded(0, TokenLayout(2))
    keys = [random(4, 2, WIDTH, symbols=["T"]) for _ in range(2)]
    refused("whole-heads", PAGED_ATTENTION, tokens, *keys, CACHE, *PLACES, *REST)
    refused("partial-nonlinear", PAGED_ATTENTION, Q6.partial(), K2, V2, CACHE, *PLACES, *REST)
    refused("kv-alike", PAGED_ATTENTION, Q6, K2, V2.partial(), CACHE, *PLACES, *REST)
    operands = (*SIX, CACHE, *PLACES)
    refused("attention", PAGED_ATTENTION, *operands, SCALE, 0, LAYER, 2)
    refused("kv-map", PAGED_ATTENTION, *operands, *REST, [0, 0, 0, 1, 1, 1])


def test_refuses_heads_with_a_batch_in_front() -> None:
    batched = [Operand(side.whole[None], replace(side.kind, shape=(1, *side.kind.shape)))
               for side in SIX]  # fmt: skip
    refused("attention", PAGED_ATTENTION, *batched, CACHE, *PLACES, *REST)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({3: torch.tensor([0, 3])}, "its 1 new tokens, got a length of 0"),
        ({2: torch.tensor([[1, 2], [0, -1]])}, r"got blocks \[1, 2\] of 2 tokens"),
        ({2: torch.tensor([[1, 2, -1], [0, -1, -1]])}, r"blocks \[1, 2, -1\]"),
        ({2: torch.tensor([[-1, 0, 1], [0, -1, -1]])}, r"blocks \[-1, 0, 1\]"),
        ({2: torch.tensor([[2, 3, 4], [0, -1, -1]])}, "a cache of 8 slots"),
        ({2: torch.zeros(2, 0, dtype=torch.long)}, r"blocks \[\]"),
    ],
    ids=["too short", "too few blocks", "padding", "padding first", "outside", "none"],
)
def test_places_that_cannot_be_are_errors(changed: dict[int, torch.Tensor], message: str) -> None:
    """Invalid tables and lengths are errors; slicing would silently read other memory."""
    places = [changed.get(place, value.whole) for place, value in enumerate(PLACES)]
    with pytest.raises(ValueError, match=message):
        PAGED_ATTENTION(*(side.whole for side in SIX), CACHE.whole.clone(), *places, *REST)


def test_sequences_of_a_call_are_as_many_as_its_tables() -> None:
    starts, slots, tables, lengths = (value.whole for value in PLACES)
    assert len(list(pairwise(starts.tolist()))) == len(tables) == len(lengths)
    places = (starts, slots, tables[:1], lengths)
    with pytest.raises(ValueError, match="argument"):
        PAGED_ATTENTION(*(side.whole for side in SIX), CACHE.whole.clone(), *places, *REST)
