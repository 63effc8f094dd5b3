"""Tests of the KV cache under Hugging Face's operations: columns, rows, copies, and refusals."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.runtime.slots import BLOCK
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.kv.blocks import BlockPool
from tpcompile.runtime.kv.cache import Appended, PagedCache


def paged(max_seq_len: int = 64, max_batch: int | None = None) -> PagedCache:
    return PagedCache(BlockPool(BLOCK), 2, max_seq_len, max_batch)


def fill(cache: PagedCache, real: list[list[int]]) -> Appended:
    with cache.append(torch.tensor(real)) as appended:
        return appended


def test_padding_takes_no_slots() -> None:
    cache = paged()
    appended = fill(cache, [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert appended.slots.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert appended.tables.tolist() == [[0, -1], [1, 2]]
    assert appended.lengths.tolist() == [3, 5]
    assert (appended.copies, appended.blocks) == ((), 4)
    assert {appended.slots.dtype, appended.tables.dtype, appended.lengths.dtype} == {torch.long}
    assert cache.get_seq_length() == 5
    assert cache.lengths == (3, 5)


def test_crop_counts_columns_as_hugging_face_does() -> None:
    cache = paged()
    fill(cache, [[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    cache.crop(-2)
    assert (cache.get_seq_length(), cache.lengths) == (3, (2, 3))
    cache.crop(2)
    assert (cache.get_seq_length(), cache.lengths) == (2, (1, 2))
    cache.crop(7)
    cache.crop(0)
    assert cache.get_seq_length() == 2
    cache.crop(-9)
    assert (cache.get_seq_length(), cache.pool.used) == (0, 0)


def test_a_copied_prompt_is_shared_until_one_side_writes() -> None:
    cache = paged()
    fill(cache, [[1] * 6])
    other = copy.deepcopy(cache)
    assert cache.pool.used == 2
    assert fill(other, [[1]]).copies == ((1, 2),)
    assert fill(cache, [[1]]).copies == ()
    fill(copy.copy(cache), [[1]])
    assert cache.lengths == (7,)
    del other
    assert cache.pool.used == 2


def test_a_failed_step_changes_nothing() -> None:
    cache = paged()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), cache.append(torch.ones(2, 5)):
            raise KeyboardInterrupt
        assert (cache.get_seq_length(), cache.lengths, cache.pool.used) == (0, (), 0)
    fill(cache, [[1] * 5])
    other = copy.deepcopy(cache)
    with pytest.raises(KeyboardInterrupt), other.append(torch.ones(1, 5)):
        raise KeyboardInterrupt
    assert (other.get_seq_length(), other.lengths, cache.pool.used) == (5, (5,), 2)


def test_blocks_go_back_when_the_cache_dies() -> None:
    pool = BlockPool(BLOCK)
    cache = PagedCache(pool, 2, 64)
    fill(cache, [[1] * 9])
    cache.reorder_cache(torch.tensor([0, 0]))
    assert pool.used == 3
    del cache
    assert pool.used == 0


@pytest.mark.parametrize(
    ("filled", "more", "message"),
    [
        (
            [[1] * 8],
            [[1]],
            "A sequence must have at most max_seq_len=8 tokens. Found 9 tokens. "
            "Compile with max_seq_len=9 or more.",
        ),
        ([[1] * 8, [0] * 8], [[1], [1]], "At row 0 of the batch"),
        (None, [[1]] * 4, "must have at most max_batch=3 sequences. Found 4 sequences"),
        ([[1]] * 2, [[1]], "as the KV cache. Found a batch of 1. Expected a batch of 2"),
    ],
)
def test_what_has_no_room(
    filled: list[list[int]] | None, more: list[list[int]], message: str
) -> None:
    cache = paged(max_seq_len=8, max_batch=3)
    if filled:
        fill(cache, filled)
    before = (cache.lengths, cache.get_seq_length(), cache.pool.used)
    with pytest.raises(UsageError, match=message):
        fill(cache, more)
    assert (cache.lengths, cache.get_seq_length(), cache.pool.used) == before


def test_only_tokens_count_for_the_longest_sequence() -> None:
    cache = paged(max_seq_len=4)
    fill(cache, [[0, 0, 0, 1, 1, 1, 1]])
    assert cache.lengths == (4,)


@pytest.mark.parametrize(
    "indices", [[0, 2], torch.tensor([0, 2]), torch.tensor([True, False, True])]
)
def test_rows_are_selected_as_tensors_are(indices: Any) -> None:
    cache = paged()
    fill(cache, [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    cache.batch_select_indices(indices)
    assert (cache.lengths, cache.batch_size) == ((1, 3), 2)
    with pytest.raises(UsageError, match=r"must be from 0 to 1: .*2"):
        cache.reorder_cache(torch.tensor([0, 2]))
    assert cache.lengths == (1, 3)


def test_an_empty_cache_takes_any_batch() -> None:
    cache = paged()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert (cache.batch_size, cache.is_initialized) == (-1, False)
    fill(cache, [[1], [1]])
    assert (cache.batch_size, cache.is_initialized) == (2, True)
    cache.reset()
    fill(cache, [[1]] * 3)
    assert cache.batch_size == 3


def test_it_answers_what_hugging_face_asks() -> None:
    cache = paged()
    fill(cache, [[1] * 5])
    assert (len(cache), cache.get_max_length(), cache.get_max_length(1)) == (2, 64, 64)
    assert (cache.get_seq_length(1), cache.get_query_offset()) == (5, 5)
    assert cache.get_mask_sizes(3, 0) == (8, 0)
    assert cache.is_sliding == cache.is_linear == cache.is_dummy == [False, False]
    assert (cache.is_compileable, cache.is_croppable) == (False, True)
    assert cache.is_recording_past(0)
    assert repr(cache) == "PagedCache(layers=2, lengths=[5])"


def test_every_public_name_of_a_cache_answers_or_is_refused() -> None:
    """Each public name of DynamicCache works or raises UnsupportedError, in all versions."""
    cache = paged()
    for name in dir(DynamicCache):
        if not name.startswith("_"):
            with suppress(UnsupportedError):
                getattr(cache, name)


def test_it_hands_out_no_tensors() -> None:
    cache = paged()
    key = torch.zeros(1, 1, 1, 1)
    for forbidden in (
        lambda: cache.update(key, key, 0),
        lambda: cache.layers[0],
        lambda: cache.early_initialization(1, 1, 1, torch.float32, torch.device("cpu")),
        lambda: cache.offload(0),
        lambda: pickle.dumps(cache),
    ):
        with pytest.raises(UnsupportedError, match="stored on the ranks"):
            forbidden()
