"""The choice of a token from logits, defined by Hugging Face's processors."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tpcompile.errors import RequestError
from tpcompile.serving.drawing import Cumulative, greatest, kept_tokens
from tpcompile.serving.params import SamplingParams

_PIECE = 2**14
"""The logits that torch converts at a time: so few that it uses no other threads."""
_CHANCE_BITS = 52
"""The bits of a random number, few enough that its product with a float64 sum is less than the
sum."""


class Chosen(NamedTuple):
    """A new token."""

    token: int
    logprob: float | None = None
    """Its log-probability before temperature and penalties, if requested."""
    top: tuple[tuple[int, float], ...] = ()
    """The tokens with the greatest log-probabilities, with their log-probabilities."""


class Sampler:
    """The choice of the tokens of one continuation.

    Its state is its seed, and counts of the tokens that it has seen. The random number of a token
    follows from the seed and its place, so the same tokens come again if a part of the continuation
    is computed again.
    """

    def __init__(
        self, params: SamplingParams, prompt: int, index: int, ends: frozenset[int]
    ) -> None:
        """`prompt` is the number of its tokens, `index` that of the continuation.

        `ends` are the tokens that end it, which must not come too early.
        """
        self._params, self._prompt, self._index = params, prompt, index
        self._ends = sorted(ends) if params.min_tokens else []
        self._biased = np.array([token for token, _ in params.biases], np.int64)
        self._biases = np.array([bias for _, bias in params.biases], np.float32)
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._counts = _SequenceCounts(prompt)

    def choose(
        self, logits: torch.Tensor, tokens: Sequence[int], forbidden: np.ndarray | None = None
    ) -> Chosen:
        """Choose the token that follows `tokens`, the prompt and all new ones, from `logits`.

        The tokens of an earlier call must be the first ones of later calls. A `forbidden` token is
        never chosen, and does not count for top-k, top-p and min-p.
        """
        params = self._params
        scores = _scores_of(logits)
        scores[self._biased] += self._biases
        if forbidden is not None:
            np.copyto(scores, -np.inf, where=forbidden)
        self._penalise(scores, tokens)
        if forbidden is not None and scores.max() == -np.inf:
            raise RequestError("No token is allowed by the structure and the other options")
        if params.temperature:
            if params.temperature != 1:
                with np.errstate(all="ignore"):  # `kept_tokens` refuses an overflow
                    scores /= np.float32(params.temperature)
            best = kept_tokens(scores, params.top_k, params.top_p, params.min_p)
            token = best.draw(self._chance(len(tokens)))
        else:
            token = int(scores.argmax())
        return (
            Chosen(token) if params.logprobs is None else described(token, logits, params.logprobs)
        )

    def _penalise(self, scores: np.ndarray, tokens: Sequence[int]) -> None:
        """Penalise tokens that have occurred, and forbid ends that come too early."""
        params = self._params
        added = params.presence_penalty or params.frequency_penalty
        if added or params.repetition_penalty != 1:
            self._counts.read(tokens, len(scores))
        if params.repetition_penalty != 1:
            penalty, ids = np.float32(params.repetition_penalty), self._counts.all.ids
            seen_scores = scores[ids]
            scores[ids] = np.where(seen_scores < 0, seen_scores * penalty, seen_scores / penalty)
        if added:
            new = self._counts.new
            penalties = params.presence_penalty + params.frequency_penalty * new.counts
            scores[new.ids] -= penalties.astype(np.float32)
        if len(tokens) - self._prompt < params.min_tokens:
            scores[self._ends] = -np.inf

    def _chance(self, place: int) -> float:
        """Return the random number of the token at a place, from 0 to less than 1."""
        text = f"{self._seed} {self._index} {place}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        return (number >> (64 - _CHANCE_BITS)) / float(1 << _CHANCE_BITS)


class _SequenceCounts:
    """The tokens of a sequence, counted incrementally."""

    def __init__(self, prompt: int) -> None:
        self._prompt, self._read = prompt, 0
        self.all, self.new = _Counts(), _Counts()

    def read(self, tokens: Sequence[int], vocabulary: int) -> None:
        """Count the new tokens."""
        ids = np.array(tokens[self._read :], np.int64)
        self.all.add(ids, vocabulary)
        self.new.add(ids[max(0, self._prompt - self._read) :], vocabulary)
        self._read = len(tokens)


class _Counts:
    """The number of occurrences of each token."""

    def __init__(self) -> None:
        self.ids = np.zeros(0, np.int64)
        self._of_all = np.zeros(0, np.int32)

    def add(self, ids: np.ndarray, vocabulary: int) -> None:
        if not len(self._of_all):
            self._of_all = np.zeros(vocabulary, np.int32)
        self.ids = np.concatenate((self.ids, np.unique(ids[self._of_all[ids] == 0])))
        np.add.at(self._of_all, ids, 1)

    @property
    def counts(self) -> np.ndarray:
        """The counts of `ids`."""
        counts: np.ndarray = self._of_all[self.ids]
        return counts


def described(token: int, logits: torch.Tensor, most: int | None) -> Chosen:
    """Return a token with its log-probability and those of the best tokens, by their logits."""
    scores = logits.numpy() if logits.dtype == torch.float32 else _scores_of(logits)
    top = scores.max()
    total = float(top) + math.log(Cumulative(scores, top).total)
    best = greatest(scores, most) if most else np.zeros(0, np.int64)
    best = best[np.argsort(-scores[best], kind="stable")][:most]
    pairs = zip(best.tolist(), scores[best].tolist(), strict=True)
    return Chosen(token, float(scores[token]) - total, tuple((i, s - total) for i, s in pairs))


def _scores_of(logits: torch.Tensor) -> np.ndarray:
    """Return a copy of logits as float32."""
    scores = np.empty(len(logits), np.float32)
    copy = torch.from_numpy(scores)
    for first in range(0, len(logits), _PIECE):
        copy[first : first + _PIECE] = logits[first : first + _PIECE]
    return scores
