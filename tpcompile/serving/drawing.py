"""A random token among those that Hugging Face's warpers keep, mostly without sorting all scores.

Top-k, top-p and min-p keep the best tokens. So a few candidates suffice, unless their probabilities
show that a worse token may be kept: only then all scores are sorted.

NumPy computes this in one thread. A row is too little work for torch's threads, which wait for each
other: if another process is busy, each operation takes milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from tpcompile.errors import UsageError

_ROWS = 64
"""The scores in a column. The best scores are searched in the columns with the best maxima."""
_COLUMNS_PER_COUNT = 4
"""With fewer columns per requested score, a search by columns is slower than a full one."""
_CANDIDATES = 256
"""The number of best tokens that are tried first."""
_RUN = 256
"""The weights that are added before the sums are cumulated."""

_SAMPLED = 64
"""The stride of the scores that are sampled to estimate whether the candidates suffice."""
_PIECE = 64 * _RUN
"""The scores whose weights are computed at a time, few enough to stay in the cache of a core."""


class Cumulative:
    """Cumulative sums of weights: of e to the power of the scores less the greatest one."""

    def __init__(self, scores: np.ndarray, top: np.floating) -> None:
        self._scores, self._top = scores, top
        pieces = (scores[first : first + _PIECE] for first in range(0, len(scores), _PIECE))
        runs = [
            np.add.reduceat(
                weights_of(piece, top), np.arange(0, len(piece), _RUN), dtype=np.float64
            )
            for piece in pieces
        ]
        self._sums = np.cumsum(np.concatenate(runs))
        self.total = float(self._sums[-1])

    def before(self, place: int) -> float:
        """Return the sum of the weights before a place."""
        run = place // _RUN
        inside = weights_of(self._scores[run * _RUN : place], self._top).sum(dtype=np.float64)
        return self._before(run) + float(inside)

    def place(self, target: float) -> int:
        """Return the first place where the cumulative sum exceeds `target`, or the last positive.

        The weight there is positive, so a token of probability 0 is never drawn.
        """
        run = _above(self._sums, target)
        weights = weights_of(self._scores[run * _RUN : (run + 1) * _RUN], self._top)
        inside = np.cumsum(weights, dtype=np.float64)
        return run * _RUN + _above(inside, target - self._before(run))

    def _before(self, run: int) -> float:
        return float(self._sums[run - 1]) if run else 0.0


def weights_of(scores: np.ndarray, top: np.floating) -> np.ndarray:
    """Return the probabilities of tokens relative to that of the best one."""
    weights: np.ndarray = scores - top
    np.exp(weights, out=weights)
    return weights


def _above(sums: np.ndarray, target: float) -> int:
    """Return the place of the first sum above a target from 0 to less than the last sum."""
    bounded = min(max(target, 0.0), np.nextafter(sums[-1], 0.0))
    return int(np.searchsorted(sums, bounded, side="right"))


@dataclass(frozen=True)
class KeptTokens:
    """Tokens that may be drawn: all by their ids, or the best ones by ascending score.

    Tokens of equal scores are in the order of their ids.
    """

    cumulative: Cumulative
    """The sums of the weights of the tokens."""
    first: int = 0
    """The place of the first token that may be drawn; all after it may be drawn too."""
    candidates: np.ndarray | None = None
    """The ids from which the best were chosen; None: all ids."""
    scores: np.ndarray | None = None
    """The scores of the candidates; None: no token was removed."""
    ordered: np.ndarray | None = None
    """The same scores, from the least to the greatest."""

    def draw(self, chance: float) -> int:
        """Return the token for a random number from 0 to less than 1."""
        before = self.cumulative.before(self.first)
        target = before + chance * (self.cumulative.total - before)
        return self.token(max(self.first, self.cumulative.place(target)))

    def token(self, place: int) -> int:
        """Return the id of the token at a place."""
        if self.ordered is None or self.scores is None:
            return place
        score = self.ordered[place]
        rank = place - int(np.searchsorted(self.ordered, score))
        index = int(np.flatnonzero(self.scores == score)[rank])
        return index if self.candidates is None else int(self.candidates[index])


def kept_tokens(
    scores: np.ndarray, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> KeptTokens:
    """Return the tokens that Hugging Face's warpers keep, which come in this order.

    Top-k keeps all tokens that equal the last one. Top-p removes the least likely tokens while
    their sum is at most 1 - `top_p`, and of equal ones those with lower ids first. Hugging Face's
    sort leaves the order of equal ones open.
    """
    top = scores.max()
    if not np.isfinite(top):
        raise UsageError(
            "No token can be drawn from these logits",
            got=f"{top} as the greatest one",
            expected="a finite number",
            hint="Use a higher temperature, and a dtype in which the model does not overflow",
        )
    if top_k is None and top_p == 1 and min_p == 0:
        return KeptTokens(Cumulative(scores, top))
    candidates, other_weight = _candidates(scores, top, top_k, top_p, min_p)
    best = scores if candidates is None else scores[candidates]
    ordered = np.sort(best)
    cumulative, first = Cumulative(ordered, top), 0
    if top_p < 1:
        first = cumulative.place((1 - top_p) * (cumulative.total + other_weight) - other_weight)
    if min_p:
        least = bisect_left(ordered, np.float32(min_p), key=lambda score: np.exp(score - top))
        first = max(first, least)
    return KeptTokens(cumulative, first, candidates, best, ordered)


def _candidates(
    scores: np.ndarray, top: np.floating, top_k: int | None, top_p: float, min_p: float
) -> tuple[np.ndarray | None, float]:
    """Return ids that include all kept tokens, and the weight of all others.

    The weight counts only for top-p: tokens that top-k removes have none. None stands for all ids.
    """
    if top_k is not None:
        return greatest(scores, top_k), 0.0
    if _all_likely(scores, top, top_p, min_p):
        return None, 0.0
    ids = greatest(scores, _CANDIDATES)
    weights = weights_of(scores[ids], top)
    decided = bool(weights.min() < min_p)
    if top_p == 1:
        return (ids if decided else None), 0.0
    mass = float(weights.sum(dtype=np.float64))
    total = Cumulative(scores, top).total
    other_weight = max(0.0, total - mass)
    if decided or other_weight <= (1 - top_p) * total:
        return ids, other_weight
    return None, 0.0


def _all_likely(scores: np.ndarray, top: np.floating, top_p: float, min_p: float) -> bool:
    """Return whether many more tokens than the candidates are likely to be kept, by a sample."""
    sample = np.sort(weights_of(scores[::_SAMPLED], top))
    worse = sample[: -2 * _CANDIDATES // _SAMPLED]
    if not len(worse) or worse[-1] < min_p:
        return False
    other_weight = _SAMPLED * float(worse.sum())
    return top_p == 1 or other_weight > 2 * (1 - top_p) * (_CANDIDATES + other_weight)


def greatest(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the greatest scores and of all that equal the last one, in order."""
    count = min(count, len(scores))
    columns = len(scores) // _ROWS
    if count * _COLUMNS_PER_COUNT > columns:
        return np.flatnonzero(scores >= _last(scores, count))
    maxima = scores[: _ROWS * columns].reshape(_ROWS, columns).max(0)
    near = np.flatnonzero(maxima >= _last(maxima, count))
    ids = (np.arange(_ROWS)[:, None] * columns + near).ravel()
    ids = np.concatenate((ids, np.arange(_ROWS * columns, len(scores))))
    values = scores[ids]
    selected: np.ndarray = ids[values >= _last(values, count)]
    return selected


def _last(values: np.ndarray, count: int) -> np.floating:
    """Return the least of the greatest values."""
    least: np.floating = np.partition(values, len(values) - count)[len(values) - count]
    return least
