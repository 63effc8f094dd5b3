"""The tokens kept are those of Hugging Face's warpers, and a draw follows their weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tpcompile.errors import UsageError
from tpcompile.serving.drawing import Cumulative, KeptTokens, greatest, kept_tokens, weights_of

ROUNDING = 1e-6
"""The distance from a limit within which rounding may decide."""
TINY = 1e-30
"""Probabilities below it may be 0 in float32."""


def warped(scores: np.ndarray, top_k: int | None, top_p: float, min_p: float) -> np.ndarray:
    """Return the probabilities that Hugging Face's warpers give, in float64."""
    warpers = LogitsProcessorList()
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    ids: Any = None
    wanted: np.ndarray = torch.softmax(warpers(ids, torch.tensor(scores)[None].double()), -1)[
        0
    ].numpy()
    return wanted


def listed(best: KeptTokens) -> tuple[list[int], np.ndarray]:
    """Return the ids of the tokens that may be drawn, with their weights."""
    scores = best.cumulative._scores[best.first :]
    ids = [best.token(best.first + place) for place in range(len(scores))]
    return ids, weights_of(scores, best.cumulative._top)


def chances(best: KeptTokens, vocabulary: int) -> np.ndarray:
    """Return the probability of each token."""
    probabilities = np.zeros(vocabulary)
    ids, weights = listed(best)
    assert len(set(ids)) == len(ids)
    probabilities[ids] = weights / weights.sum(dtype=np.float64)
    return probabilities


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Draw scores: smooth or with many ties, flat or peaked, some of them forbidden."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.one_of(st.integers(1, 70), st.sampled_from([1000, 4097, 70_001])))
    scores = dice.standard_normal(size) * draw(st.sampled_from([0.0, 0.1, 1, 4, 30]))
    step = draw(st.sampled_from([0, 0, 0.5, 2]))
    if step:
        scores = np.round(scores / step) * step
    if draw(st.booleans()):
        scores[dice.random(size) < 0.3] = -np.inf
        scores[dice.integers(size)] = 1.0
    return scores.astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(
    rows(),
    st.one_of(st.none(), st.integers(1, 60), st.sampled_from([900, 30_000, 10**9])),
    st.one_of(st.just(1.0), st.floats(1e-9, 1.0)),
    st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
def test_the_tokens_and_probabilities_of_hugging_face(
    scores: np.ndarray, top_k: int | None, top_p: float, min_p: float
) -> None:
    wanted = warped(scores, top_k, top_p, min_p)
    sizes = [len(wanted[wanted > 0])]
    for nudge in (-ROUNDING, ROUNDING):
        near_p = min(1.0, max(1e-12, top_p + nudge)) if top_p < 1 else 1.0
        near_min = min(1.0, max(0.0, min_p * (1 - nudge))) if min_p else 0.0
        near = warped(scores, top_k, near_p, near_min)
        sizes.append(len(near[near > 0]))
    probabilities = chances(kept_tokens(scores, top_k, top_p, min_p), len(scores))
    likely = [np.sort(values[values > TINY]) for values in (probabilities, wanted)]
    assert min(sizes) - np.count_nonzero((wanted > 0) & (wanted <= TINY)) <= len(likely[0])
    assert len(likely[0]) <= max(sizes)
    if min(sizes) == max(sizes):
        np.testing.assert_allclose(likely[0], likely[1], rtol=1e-4)
        limit = scores[probabilities > TINY].min()
        assert limit == scores[wanted > TINY].min()
        assert np.array_equal(
            (probabilities > TINY) & (scores > limit), (wanted > TINY) & (scores > limit)
        )


@pytest.mark.parametrize(("top_p", "ids"), [(0.3, [7]), (0.5, [6, 7]), (0.74, [6, 7])])
def test_of_equal_tokens_those_with_higher_ids_stay(top_p: float, ids: list[int]) -> None:
    scores = np.full(8, -50.0, np.float32)
    scores[[1, 3, 6, 7]] = 2.0
    assert np.flatnonzero(chances(kept_tokens(scores, top_p=top_p), 8)).tolist()[-len(ids) :] == ids
    assert np.flatnonzero(warped(scores, None, top_p, 0.0)).tolist()[-len(ids) :] == ids


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 5000}])
def test_a_draw_inverts_the_cumulative_probabilities(options: dict[str, Any]) -> None:
    """The interval of random numbers of each token is as long as its probability."""
    scores = np.random.default_rng(3).standard_normal(9000).astype(np.float32)
    best = kept_tokens(scores, **options)
    ids, weights = listed(best)
    ends = np.cumsum(weights, dtype=np.float64)
    ends /= ends[-1]
    begins = np.concatenate(([0.0], ends[:-1]))
    for place in (0, 1, 254, 255, 256, 257, len(ends) // 2, len(ends) - 1):
        inside = 1e-9 * (ends[place] - begins[place]) + 1e-13
        for chance in (begins[place] + inside, ends[place] - inside):
            assert best.draw(chance) == ids[place]


def test_every_random_number_gives_a_token_of_positive_weight() -> None:
    dice = np.random.default_rng(5)
    for size in (1, 2, 255, 256, 257, 512, 3000):
        weights = (dice.random(size) ** 40).astype(np.float32) * (dice.random(size) < 0.2)
        weights[dice.integers(size)] = 1e-30
        with np.errstate(divide="ignore"):
            sums = Cumulative(np.log(weights), np.float32(0))
        targets = [0.0, sums.total, math.nextafter(sums.total, 0), *(dice.random(50) * sums.total)]
        assert all(weights[sums.place(target)] > 0 for target in targets)


@pytest.mark.parametrize("top", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_logits_from_which_no_token_can_be_drawn(top: float, options: dict[str, Any]) -> None:
    scores = np.full(100, min(top, 0.0) if top == -math.inf else 0.0, np.float32)
    scores[7] = top
    with pytest.raises(UsageError, match="No token can be drawn from these logits"):
        kept_tokens(scores, **options)


@pytest.mark.parametrize("count", [1, 20, 63, 64, 65, 500, 5000, 10**6])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_the_greatest_scores(count: int, step: float) -> None:
    smooth = np.random.default_rng(1).standard_normal(20_011)
    scores = (np.round(smooth / step) * step if step else smooth).astype(np.float32)
    last = np.sort(scores)[-min(count, len(scores))]
    assert np.array_equal(greatest(scores, count), np.flatnonzero(scores >= last))
