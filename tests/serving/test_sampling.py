"""The choice of a token: Hugging Face's processors, penalties, seeds and log-probabilities."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from tpcompile.errors import UsageError
from tpcompile.serving import SamplingParams
from tpcompile.serving import sampling as module
from tpcompile.serving.drawing import kept_tokens
from tpcompile.serving.sampling import Sampler, described

VOCABULARY = 40_003


def logits(rows: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    dice = torch.Generator().manual_seed(3)
    return (3 * torch.randn(rows, VOCABULARY, generator=dice)).to(dtype)


def sampler(prompt: int = 4, index: int = 0, **options: Any) -> Sampler:
    return Sampler(SamplingParams(**options), prompt, index, frozenset({5, 6}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3])
def test_the_scores_are_those_of_hugging_face(
    dtype: torch.dtype, penalty: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []

    def remember(scores: Any, *options: Any) -> Any:
        recorded.append(torch.tensor(scores))
        return kept_tokens(scores, *options)

    monkeypatch.setattr(module, "kept_tokens", remember)
    (row,) = logits(dtype=dtype)
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if penalty != 1:
        processors.insert(0, RepetitionPenaltyLogitsProcessor(penalty))
    chooser = sampler(temperature=temperature, repetition_penalty=penalty, seed=1)
    for tokens in ([9, 8, 9, 7], [9, 8, 9, 7, 1], [9, 8, 9, 7, 1, 8, 2]):
        chooser.choose(row, tokens)
        ids: Any = torch.tensor([tokens])
        assert torch.equal(recorded.pop(), processors(ids, row.float()[None])[0])


def test_presence_and_frequency_count_new_tokens() -> None:
    chooser = sampler(presence_penalty=1.0, frequency_penalty=0.5)
    row = torch.zeros(10)
    row[:4] = torch.tensor([3.0, 2.6, 1.4, 1.6])
    tokens, chosen = [0, 0, 0, 0], []
    for _ in range(5):
        chosen.append(chooser.choose(row, tokens).token)
        tokens.append(chosen[-1])
    assert chosen == [0, 1, 3, 0, 2]


def test_the_end_does_not_come_too_early() -> None:
    row = torch.zeros(10)
    row[5] = 9.0
    assert sampler(min_tokens=2).choose(row, [1, 1, 1, 1, 2]).token == 0
    assert sampler(min_tokens=2).choose(row, [1, 1, 1, 1, 2, 2]).token == 5
    drawn = sampler(min_tokens=9, temperature=1, seed=1)
    assert all(drawn.choose(row, [1] * n).token not in (5, 6) for n in range(4, 12))


SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 2.0, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 3},
]


@pytest.mark.parametrize("options", SETTINGS)
def test_a_row_gives_the_same_token_in_any_batch(options: dict[str, Any]) -> None:
    """It depends on the row, the seed, the continuation and the place, and on nothing else."""
    batch, tokens = logits(8), [1, 2, 3, 4, 5]
    wanted = [sampler(seed=n, **options).choose(row, tokens) for n, row in enumerate(batch)]
    for count in (3, 1):
        threads = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            for n in (6, 2, 5):
                alone = batch[n].clone()
                assert sampler(seed=n, **options).choose(alone, tokens) == wanted[n]
                assert torch.equal(alone, batch[n]), "the logits are not changed"
        finally:
            torch.set_num_threads(threads)


def test_seeds_continuations_and_places_differ() -> None:
    (row,) = logits()
    tokens = {
        sampler(seed=seed, index=index, temperature=2.0).choose(row, [1] * length).token
        for seed in (1, 2)
        for index in (0, 1)
        for length in (4, 5)
    }
    assert len(tokens) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_torch(dtype: torch.dtype) -> None:
    (row,) = logits(dtype=dtype)
    wanted = torch.log_softmax(row.double(), 0)
    chosen = described(11, row, 20)
    assert chosen.logprob == pytest.approx(float(wanted[11]), abs=1e-5)
    assert [value for _, value in chosen.top] == pytest.approx(wanted.topk(20).values.tolist())
    assert all(value == pytest.approx(float(wanted[token])) for token, value in chosen.top)
    assert described(11, row, 0).top == ()


def test_biases_come_before_penalties_and_change_no_log_probability() -> None:
    row = torch.tensor([3.0, 2.5, -1.0, 0.0])
    plain = sampler(logprobs=2).choose(row, [0])
    assert sampler(logit_bias={3: 100, 1: -100.0}).choose(row, [0]).token == 3
    banned = sampler(logprobs=2, logit_bias={0: -100}).choose(row, [0])
    assert banned.token == 1 and banned.top == plain.top
    assert banned.logprob == pytest.approx(float(torch.log_softmax(row, 0)[1]))
    # -1 + 5 is positive, so the penalty divides it; a bias after the penalty would give -9 + 5.
    assert sampler(logit_bias={2: 5}, repetition_penalty=9.0).choose(row, [0, 1, 2]).token == 2


def test_biases_are_pairs_by_token() -> None:
    params = SamplingParams(logit_bias={7: 1, 2: -1})
    assert params.logit_bias == params.biases == ((2, -1.0), (7, 1.0))
    assert params == SamplingParams(logit_bias=((7, 1.0), (2, -1.0))) and not params.plain
    params.check_vocabulary(8)
    with pytest.raises(UsageError, match="logit_bias must be from 0 to 6, got 7"):
        params.check_vocabulary(7)


BAD_BIASES: dict[str, Any] = {
    "must be a number from -100 to 100, got 100.5 for token 1": {1: 100.5},
    "must be a number from -100 to 100, got nan": {1: float("nan")},
    "must be a number from -100 to 100, got True": {1: True},
    "Tokens of logit_bias must be token ids, got '1'": {"1": 1.0},
    "must be a mapping of tokens to numbers, got 3": 3,
}


@pytest.mark.parametrize("message", BAD_BIASES)
def test_bad_biases(message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        SamplingParams(logit_bias=BAD_BIASES[message])
