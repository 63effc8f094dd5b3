"""States of linear attention in a KV cache: shared, freed, restored, and never cropped."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import tpcompile
from tests.hybrids import VOCABULARY, lively_hybrid, random_config
from tests.models import TOLERANCE, relative_error
from tests.runtime.slots import BLOCK
from tpcompile.errors import UnsupportedError
from tpcompile.runtime.kv.blocks import BlockPool
from tpcompile.runtime.kv.cache import Appended, PagedCache


def paged() -> PagedCache:
    return PagedCache(BlockPool(BLOCK, states=BlockPool(1)), 2, 64, None)


def fill(cache: PagedCache, *counts: int) -> Appended:
    """Append tokens to each row, padded on the left."""
    real = torch.zeros(len(counts), max(counts), dtype=torch.long)
    for row, count in enumerate(counts):
        real[row, max(counts) - count :] = 1
    with cache.append(real) as appended:
        return appended


def held(cache: PagedCache) -> int:
    """Return the number of states in use; the pool first frees those of caches that have died."""
    assert cache.pool.states is not None and cache.pool.used >= 0
    return cache.pool.states.used


def test_blocks_and_states_that_ranks_cannot_allocate_are_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(step: object) -> None:
        raise MemoryError

    with tpcompile.compile("preset:tiny-qwen3.5", random_weights=0, backend="torch") as model:
        pool = model._cache_pool
        assert pool.states is not None
        sizes = pool.sizes
        monkeypatch.setattr(model, "run_step", fail)
        with pytest.raises(MemoryError):
            model.reserve(50, 3)
        assert (pool.sizes, pool.used, pool.states.used) == (sizes, 0, 0)


def test_a_step_reads_the_state_before_and_writes_another() -> None:
    cache = paged()
    first = fill(cache, 3, 5)
    assert first.states >= 2 and first.write.tolist() == [0, 1]
    second = fill(cache, 1, 1)
    assert second.read.tolist() == first.write.tolist()
    assert not set(second.read.tolist()) & set(second.write.tolist())
    assert held(cache) == 2
    assert {first.read.dtype, first.write.dtype} == {torch.long}
    third = fill(cache, 1, 1)
    assert third.read.tolist() == second.write.tolist()
    assert third.states == second.states == 4
    assert set(third.inputs()) == {"slots", "tables", "lengths", "read", "write"}


def test_a_row_without_new_tokens_keeps_its_state() -> None:
    cache = paged()
    first = fill(cache, 3, 5)
    second = fill(cache, 0, 2)
    assert second.write.tolist()[0] == first.write.tolist()[0] == second.read.tolist()[0]
    assert held(cache) == 2


def test_a_cache_without_linear_attention_has_no_states() -> None:
    cache = PagedCache(BlockPool(BLOCK), 2, 64, None)
    assert set(fill(cache, 3).inputs()) == {"slots", "tables", "lengths"}
    assert cache.is_croppable and cache.is_recording_past(0)


def test_a_copy_shares_the_state_until_one_side_goes_on() -> None:
    cache = paged()
    first = fill(cache, 3)
    other = copy.deepcopy(cache)
    assert held(cache) == 1
    ours, theirs = fill(cache, 1), fill(other, 1)
    assert ours.read.tolist() == theirs.read.tolist() == first.write.tolist()
    assert ours.write.tolist() != theirs.write.tolist()
    assert first.write.tolist()[0] not in (*ours.write.tolist(), *theirs.write.tolist())
    assert held(cache) == 2
    del other
    gc.collect()
    assert held(cache) == 1


def test_rows_are_chosen_with_their_states() -> None:
    cache = paged()
    first = fill(cache, 3, 5).write.tolist()
    cache.batch_repeat_interleave(2)
    assert held(cache) == 2
    second = fill(cache, 1, 1, 1, 1)
    assert second.read.tolist() == [first[0], first[0], first[1], first[1]]
    assert len(set(second.write.tolist())) == 4 and held(cache) == 4
    cache.reorder_cache(torch.tensor([3, 3, 0, 1]))
    assert held(cache) == 3
    assert fill(cache, 1, 1, 1, 1).read.tolist() == [second.write.tolist()[i] for i in (3, 3, 0, 1)]
    cache.batch_select_indices(torch.tensor([2]))
    assert held(cache) == 1


def test_states_go_back_when_the_cache_is_reset_or_dies() -> None:
    cache = paged()
    pool = cache.pool
    fill(cache, 3, 5)
    cache.reset()
    assert pool.used == held(cache) == 0
    again = fill(cache, 4)
    assert again.read.tolist() == [0] and held(cache) == 1
    del cache, again
    gc.collect()
    assert pool.states is not None
    assert (pool.used, pool.states.used) == (0, 0)


def test_a_failed_step_restores_the_states() -> None:
    cache = paged()
    with pytest.raises(KeyboardInterrupt), cache.append(torch.ones(2, 5)):
        raise KeyboardInterrupt
    assert held(cache) == 0
    first = fill(cache, 5, 5)
    other = copy.deepcopy(cache)
    with pytest.raises(KeyboardInterrupt), other.append(torch.ones(2, 1)):
        raise KeyboardInterrupt
    assert held(cache) == 2
    assert fill(other, 1, 1).read.tolist() == first.write.tolist()


def test_a_cache_with_states_is_never_cropped() -> None:
    cache = paged()
    fill(cache, 5)
    assert not cache.is_croppable and not cache.is_recording_past(0)
    for length in (-1, 4):
        with pytest.raises(UnsupportedError, match="linear attention cannot be cropped") as refused:
            cache.crop(length)
        assert "copy.deepcopy" in str(refused.value)
    assert (cache.get_seq_length(), held(cache)) == (5, 1)
    cache.crop(9)
    cache.crop(-5)
    assert (cache.get_seq_length(), held(cache), cache.pool.used) == (0, 0, 0)
    assert cache.lengths == (0,)
    assert fill(cache, 2).lengths.tolist() == [2]


# With a model.


@pytest.fixture(scope="module")
def eager() -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "full_attention_interval": 2}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    return lively_hybrid(random_config(1, num_hidden_layers=4, **heads, **linear))


@pytest.fixture(scope="module")
def compiled(eager: Any) -> Any:
    return tpcompile.compile(eager, tp=2, simulate=True, backend="torch", max_seq_len=256)


def ids(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, columns), generator=generator)


def test_packed_sequences_are_those_run_alone(eager: Any, compiled: Any) -> None:
    """Hugging Face lets states leak from one to the next on a CPU; here they do not."""
    lengths = (70, 1, 2, 9)
    packed = ids(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits = compiled(packed, position_ids=positions, use_cache=False).logits[0].split(lengths)
    for tokens, part_logits in zip(packed[0].split(lengths), logits, strict=True):
        with torch.inference_mode():
            expected = eager(tokens[None]).logits[0]
        assert relative_error(part_logits, expected) < TOLERANCE


def test_a_copied_cache_goes_on_from_the_same_state(eager: Any, compiled: Any) -> None:
    prompt = ids(2, 66)
    cache = compiled(prompt, use_cache=True).past_key_values
    other = copy.deepcopy(cache)
    first, second = ids(2, 3, seed=1), ids(2, 3, seed=2)
    for branch, more in ((cache, first), (other, second), (other, first)):
        logits = compiled(more, past_key_values=branch).logits
        if branch is other and more is first:
            prompt = torch.cat([prompt, second], 1)
        with torch.inference_mode():
            expected = eager(torch.cat([prompt, more], 1)).logits[:, -3:]
        assert relative_error(logits, expected) < TOLERANCE


def test_chunks_of_64_continue_the_prompt(compiled: Any) -> None:
    """The ops keep its bits. In fp32 torch's linears may not: they add by the number of tokens."""
    prompt = ids(2, 200)
    whole = compiled(prompt, use_cache=True).logits
    cache, parts = None, []
    for part in prompt.split((64, 128, 8), 1):
        output = compiled(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert relative_error(torch.cat(parts, 1), whole) < TOLERANCE


def test_a_step_that_fails_on_the_ranks_can_be_repeated(
    eager: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ids(1, 9)
    cache = compiled(prompt, use_cache=True).past_key_values
    with monkeypatch.context() as patched:
        patched.setattr(compiled._ranks, "run", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compiled(ids(1, 2), past_key_values=cache)
    more = ids(1, 2, seed=1)
    logits = compiled(more, past_key_values=cache).logits
    with torch.inference_mode():
        expected = eager(torch.cat([prompt, more], 1)).logits[:, -2:]
    assert relative_error(logits, expected) < TOLERANCE


def test_all_blocks_and_states_are_free_at_the_end(compiled: Any) -> None:
    compiled.generate(ids(2, 5), max_new_tokens=5, num_beams=3)
    gc.collect()
    pool = compiled._pool
    assert (pool.used, pool.states.used) == (0, 0)


def test_workers_in_processes(eager: Any) -> None:
    """Ranks in processes grow their states, and answer as simulated ones."""
    prompt = ids(3, 9)
    with torch.inference_mode():
        expected = eager.generate(prompt, max_new_tokens=6, pad_token_id=0)
        beams = eager.generate(prompt, max_new_tokens=6, num_beams=2, pad_token_id=0)
    with tpcompile.compile(eager, tp=2, backend="torch", max_seq_len=64) as model:
        tokens = model.generate(prompt, max_new_tokens=6, pad_token_id=0)
        assert tokens.tolist() == expected.tolist()
        tokens = model.generate(prompt, max_new_tokens=6, num_beams=2, pad_token_id=0)
        assert tokens.tolist() == beams.tolist()
