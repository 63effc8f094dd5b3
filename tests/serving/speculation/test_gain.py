"""The number of guesses is the one that gives most tokens per second."""

from __future__ import annotations

from itertools import product

import pytest

from tpcompile.serving.speculation.gain import Rate, Times, counts_for


def measured(times: dict[int, float]) -> Times:
    known = Times()
    for rows, seconds in times.items():
        for time in (99.0, seconds, 99.0):  # the first step makes its program; another is held up
            known.add(rows, time, guesses=rows > 1)
    return known


def speed(counts: tuple[int, ...], rates: list[float], times: Times, per_guess: float) -> float:
    tokens = sum(
        rate**i for rate, count in zip(rates, counts, strict=True) for i in range(count + 1)
    )
    rows = sum(counts) + len(counts)
    return tokens / (times.of(rows, guesses=rows > len(counts)) + per_guess * max(counts))


@pytest.mark.parametrize("rates", [[0.9], [0.3], [0.0], [0.9, 0.1], [0.5, 0.8, 0.95]])
@pytest.mark.parametrize("per_guess", [0.0, 0.004])
@pytest.mark.parametrize(
    "times",
    [
        {1: 0.03, 2: 0.031, 4: 0.032, 8: 0.035, 16: 0.05},
        {1: 0.03, 2: 0.05, 4: 0.06, 8: 0.1, 16: 0.2},
    ],
)
def test_no_other_numbers_are_faster(
    rates: list[float], per_guess: float, times: dict[int, float]
) -> None:
    known, most = measured(times), [4] * len(rates)
    counts = counts_for(rates, most, known, 16, per_guess)
    best = max(
        speed(numbers, rates, known, per_guess) for numbers in product(range(5), repeat=len(rates))
    )
    assert speed(tuple(counts), rates, known, per_guess) >= best / 1.01


def test_limits() -> None:
    times = Times()
    for count in (16, 17):
        assert counts_for([0.9] * count, [8] * count, times, 16, 0.0) == [0] * count
    assert sum(counts_for([0.9] * 4, [8] * 4, times, 16, 0.0)) == 12
    assert counts_for([0.99, 0.99], [0, 1], times, 16, 0.0) == [0, 1]
    assert counts_for([], [], times, 16, 0.0) == []
    free = measured({1: 0.03, 2: 0.03, 3: 0.03})
    assert counts_for([0.09], [2], free, 16, 0.0) == [1]  # a second one has a chance below 1 %


def test_times_that_are_not_known_follow_from_those_that_are() -> None:
    times = Times()
    assert times.of(8, guesses=True) / times.of(1, guesses=False) == pytest.approx(1.14)
    times.add(1, 5.0, guesses=False)
    assert times.of(1, guesses=False) == 1.0
    for seconds in (0.04, 0.03, 9.0):
        times.add(1, seconds, guesses=False)
    assert times.of(1, guesses=False) == 0.03
    assert times.of(7, guesses=True) == pytest.approx(0.03 * 1.12)
    assert times.of(9, guesses=True) == times.of(10, guesses=True) < times.of(11, guesses=True)


def test_fewer_guesses_are_tried_after_many_were_slow() -> None:
    """Five rows cost more than they gain, but two, which were never measured, are worth a try."""
    times = measured({1: 0.014, 6: 0.049})
    assert times.of(2, guesses=True) == pytest.approx(0.021)
    assert 1 <= counts_for([0.8], [4], times, 16, 0.0)[0] < 4


def test_steps_with_guesses_are_other_steps() -> None:
    """They have programs of their own, and one that is made late is no step's time."""
    times = measured({2: 0.05})
    assert times.of(2, guesses=False) == 0.05  # expected
    for seconds in (9.0, 0.03):
        times.add(2, seconds, guesses=False)
    assert times.of(2, guesses=False) == 0.03 and times.of(2, guesses=True) == 0.05


def test_steps_without_guesses_are_measured_from_time_to_time() -> None:
    times = Times()
    for _ in range(2):
        assert times.is_due(3)
        times.add(3, 0.03, guesses=False)
    steps = 0
    while not times.is_due(3) and steps < 1000:
        assert times.is_due(5)
        times.add(8, 0.04, guesses=True)
        steps += 1
    assert 100 <= steps < 1000
    times.add(3, 0.03, guesses=False)
    assert not times.is_due(3)


def test_a_rate_follows_the_latest_guesses() -> None:
    rate = Rate(0.7)
    rate.add(0, wrong=True)
    rate.add(0, wrong=True)
    assert rate.value == pytest.approx(0.35)  # a mean at first, with two guesses at 0.7
    rate.add(60, wrong=False)
    assert rate.value > 0.95
    rate.add(0, wrong=True)
    assert 0.85 < rate.value < 0.9
