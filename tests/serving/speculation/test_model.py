"""Guesses of a model: its greedy continuations, computed for all sequences together."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

import tpcompile
from benchmarks.speculation_bits import answers, requests
from tests.runtime.eager_pair import lively
from tpcompile.serving.speculation import ModelDrafter, Wanted

pytestmark = pytest.mark.usefixtures("captured_once")
LENGTHS = (1, 3, 40, 17)
"""The lengths of prompts: single tokens, rows, and prompts of modules."""
MOST = 6


@pytest.fixture(scope="module", params=["tiny-qwen3", "tiny-qwen3.5"])
def draft(request: pytest.FixtureRequest) -> Iterator[tpcompile.CompiledModel]:
    with tpcompile.compile(lively(request.param), max_seq_len=96) as compiled:
        yield compiled


def texts_of(draft: Any, lengths: tuple[int, ...] = LENGTHS) -> dict[int, list[int]]:
    dice = Random(2)
    words = draft.config.vocab_size
    return {
        key: [dice.randrange(words) for _ in range(length)] for key, length in enumerate(lengths)
    }


def continuation(draft: Any, tokens: list[int], most: int) -> list[int]:
    ids = draft.generate(
        torch.tensor([tokens]), max_new_tokens=most, eos_token_id=None, pad_token_id=0
    )
    new: list[int] = ids[0, len(tokens) :].tolist()
    return new


def proposed(drafter: ModelDrafter, texts: dict[int, list[int]], most: int = MOST) -> Any:
    return drafter.propose([Wanted(key, tokens, most) for key, tokens in texts.items()])


def test_guesses_are_greedy_continuations(draft: Any) -> None:
    """Also after wrong guesses, of which as many are accepted as the key says."""
    drafter, texts = ModelDrafter(draft, draft, 8), texts_of(draft)
    for _ in range(4):
        guesses = proposed(drafter, texts)
        for (key, tokens), drafted in zip(texts.items(), guesses, strict=True):
            assert drafted == continuation(draft, tokens, MOST)
            tokens += [*drafted[: 2 * key], 7 + key]


def test_different_numbers_of_guesses(draft: Any) -> None:
    drafter, texts = ModelDrafter(draft, draft, 8), texts_of(draft)
    wanted = [Wanted(key, tokens, key + 1) for key, tokens in texts.items()]
    expected = [continuation(draft, list(item.tokens), item.most) for item in wanted]
    assert drafter.propose(wanted) == expected
    assert drafter.propose(wanted) == expected


def test_sequences_share_steps(draft: Any) -> None:
    """Two sequences take as many steps as one, also when all guesses were accepted."""
    drafter, texts = ModelDrafter(draft, draft, 8), texts_of(draft, (4, 4))
    first = proposed(drafter, texts)
    for tokens, guesses in zip(texts.values(), first, strict=True):
        tokens += [*guesses, 9]
    before = draft.steps
    proposed(drafter, texts)
    steps = [now - past for now, past in zip(draft.steps, before, strict=True)]
    assert sum(steps[:2]) == MOST


def test_few_sequences_at_a_time() -> None:
    """A draft that was compiled for two sequences guesses for four."""
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=96, max_batch=2) as draft:
        texts = texts_of(draft)
        expected = [continuation(draft, tokens, MOST) for tokens in texts.values()]
        assert proposed(ModelDrafter(draft, draft, 8), texts) == expected


def test_no_guesses_after_the_longest_sequence(draft: Any) -> None:
    texts = texts_of(draft, (95, 96, 92))
    guesses = proposed(ModelDrafter(draft, draft, 8), texts)
    expected = [continuation(draft, tokens, 96 - len(tokens)) for tokens in (texts[0], texts[2])]
    assert guesses == [expected[0], [], expected[1]]


def test_blocks_and_states_are_freed(draft: Any) -> None:
    pool = draft._pool
    pools = [pool, *([pool.states] if pool.states else [])]
    before = [block_pool.used for block_pool in pools]
    drafter, texts = ModelDrafter(draft, draft, 8), texts_of(draft)
    proposed(drafter, texts)
    held = [block_pool.used for block_pool in pools]
    assert all(now > past for now, past in zip(held, before, strict=True))
    for key in texts:
        drafter.forget(key)
    assert [block_pool.used for block_pool in pools] == before


def test_modules_guess_too() -> None:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=96, backend="torch") as draft:
        texts = texts_of(draft)
        expected = [continuation(draft, tokens, MOST) for tokens in texts.values()]
        assert proposed(ModelDrafter(draft, draft, 8), texts) == expected


def test_a_draft_with_linear_attention_changes_no_bit(draft: Any) -> None:
    """The model itself is right about greedy tokens."""
    wanted = requests(Random(3), 8, draft.config.vocab_size)
    plain = answers(draft, wanted)
    before = draft.steps
    assert answers(draft, wanted, speculate=draft) == plain
    assert draft.steps.accepted > before.accepted
