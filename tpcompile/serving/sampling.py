"""The choice of a token from logits, by Hugging Face's own processors where they exist."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tpcompile.serving.params import SamplingParams


class Chosen(NamedTuple):
    """A new token."""

    token: int
    logprob: float | None = None
    """Its log-probability before temperature and penalties, if it was asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The tokens with the greatest log-probabilities, and these."""


class Sampler:
    """The choice of the tokens of one continuation.

    It has no state but its seed: the random number of a token follows from the seed and its place.
    So the same tokens come again if a part of the continuation is computed again.
    """

    def __init__(
        self, params: SamplingParams, prompt: int, index: int, ends: frozenset[int]
    ) -> None:
        """`prompt` is the number of its tokens, `index` that of the continuation.

        `ends` are the tokens that end it, which must not come too early.
        """
        self._params, self._prompt, self._index = params, prompt, index
        self._ends = sorted(ends) if params.min_tokens else []
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._generator = torch.Generator()
        self._before = LogitsProcessorList()
        if params.repetition_penalty != 1:
            self._before.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        self._warpers = _warpers(params)

    def choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> Chosen:
        """Choose the token that follows `tokens`, the prompt and all new ones, from `logits`."""
        params = self._params
        scores = logits.float()[None]
        logprobs = None if params.logprobs is None else torch.log_softmax(scores[0], 0)
        scores = self._penalised(scores, tokens)
        if params.temperature:
            ids: Any = torch.tensor([tokens])
            chances = torch.softmax(self._warpers(ids, scores), -1)[0]
            self._generator.manual_seed(self._number(len(tokens)))
            token = int(torch.multinomial(chances, 1, generator=self._generator))
        else:
            token = int(scores[0].argmax())
        return Chosen(token) if logprobs is None else described(token, logprobs, params.logprobs)

    def _penalised(self, scores: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        params, new = self._params, tokens[self._prompt :]
        if self._before:
            ids: Any = torch.tensor([tokens])
            scores = self._before(ids, scores)
        if new and (params.presence_penalty or params.frequency_penalty):
            counts = Counter(new)
            scores = scores.clone()
            penalties = params.presence_penalty + params.frequency_penalty * torch.tensor(
                list(counts.values())
            )
            scores[0, list(counts)] -= penalties
        if len(new) < params.min_tokens:
            scores = scores.clone()
            scores[0, self._ends] = -torch.inf
        return scores

    def _number(self, place: int) -> int:
        """Return the seed of the token at a place."""
        text = f"{self._seed} {self._index} {place}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def described(token: int, logprobs: torch.Tensor, most: int | None) -> Chosen:
    """Return a token with its log-probability and those of the best tokens."""
    best = torch.topk(logprobs, most or 0)
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Chosen(token, float(logprobs[token]), tuple(top))


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    """Return the warpers in Hugging Face's order."""
    found = LogitsProcessorList()
    if params.temperature not in (0, 1):
        found.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k is not None:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        found.append(MinPLogitsWarper(params.min_p))
    return found
