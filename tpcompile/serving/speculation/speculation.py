"""Guesses in the steps of an engine: their number per sequence, and their results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import takewhile
from statistics import median_low

from tpcompile.runtime.kv.cache import Guesses
from tpcompile.runtime.ranks.step import MOST_ROWS, size_for
from tpcompile.serving.plan import Piece, Sequence
from tpcompile.serving.speculation.drafters import Drafter, Wanted
from tpcompile.serving.speculation.gain import Rate, Times, counts_for

_FIRST_RATES = {True: 0.05, False: 0.7}
"""The expected share of right guesses before there are any, of free ones and of others. Free ones
are compared with the next tokens before any is computed."""
_PROBE = 32
"""The steps after which a guess is computed although it does not seem worth the time, if right
guesses would be."""
_TIMES = 5
"""The latest times of guesses, whose median counts. Some include the compilation of a program."""
_FEWEST_TIMES = 3
"""The times that are measured before guesses cost anything."""


@dataclass
class _State:
    """The acceptance rate of a sequence, and its pending test."""

    rate: Rate
    steps: int = 1
    """The steps since the last computed guess; a draft model must first compute their tokens, and
    the prompt before the first guess."""
    test: tuple[int, int] | None = None
    """A place and a guess for it that no step computes, to learn whether guesses would be right."""


class Speculation:
    """The guesses for the sequences of an engine.

    Their number follows from the share of right ones so far, of each sequence, and from the
    measured times of steps. Steps without guesses are measured first, and again from time to time.
    If guesses are not worth their time, none are computed. Free ones are then compared with the
    next tokens; of others, one is computed from time to time.
    """

    def __init__(
        self, drafter: Drafter, counts: Guesses, vocabulary: int, most_rows: int = MOST_ROWS
    ) -> None:
        """Begin with no sequences. `most_rows` is the maximum number of rows of a step.

        A guess outside of the `vocabulary` is wrong, and so are those after it: they are dropped.
        """
        self.counts = counts
        """The numbers of guesses, which `learn` increases."""
        self._drafter, self._vocabulary, self._most_rows = drafter, vocabulary, most_rows
        self._times = Times()
        self._rate = Rate(_FIRST_RATES[drafter.free])
        """The rate of all sequences, with which new ones begin."""
        self._states: dict[Sequence, _State] = {}
        self._times_of_guesses: dict[int, deque[float]] = {}
        """By number of sequences, which `size_for` rounds up."""

    def guess(self, rooms: Mapping[Sequence, int]) -> None:
        """Set the drafts of sequences that decode, given the number of tokens that may follow."""
        for sequence in self._states.keys() - rooms.keys():
            del self._states[sequence]
            self._drafter.forget(sequence)
        states = [self._state(sequence) for sequence in rooms]
        most = [min(self._drafter.most, room) for room in rooms.values()]
        due = self._times.is_due(len(states))
        rates = [state.rate.value for state in states]
        counts = [0] * len(states) if due else self._counts(rates, most)
        late = not (due or self._drafter.free) and any(state.steps >= _PROBE for state in states)
        worth = late and any(self._counts([1.0] * len(states), most))
        wanted: dict[Sequence, int] = {}
        for sequence, state, count, limit in zip(rooms, states, counts, most, strict=True):
            probes = self._drafter.free or (worth and state.steps >= _PROBE)
            if number := min(limit, count or int(probes)):
                wanted[sequence] = number
        numbers = dict(zip(rooms, counts, strict=True))
        for sequence, guesses in zip(wanted, self._proposed(wanted), strict=True):
            if guesses and self._drafter.free and not numbers[sequence]:
                self._states[sequence].test = len(sequence.tokens), guesses[0]
            else:
                sequence.draft = list(takewhile(self._is_token, guesses[: wanted[sequence]]))

    def _counts(self, rates: list[float], most: list[int]) -> list[int]:
        """Return the number of guesses of each sequence, given the rates of right ones."""
        per_guess = self._per_guess(len(rates))
        return counts_for(rates, most, self._times, self._most_rows, per_guess)

    def _is_token(self, guess: int) -> bool:
        return 0 <= guess < self._vocabulary

    def learn(self, piece: Piece, accepted: int) -> None:
        """Count the guesses of a piece, of which the first `accepted` were right."""
        state = self._state(piece.sequence)
        state.steps = 0 if piece.guesses else state.steps + 1
        self.counts.drafted += len(piece.guesses)
        self.counts.accepted += accepted
        wrong = accepted < len(piece.guesses)
        for rate in (state.rate, self._rate):
            rate.add(accepted, wrong)

    def timed(self, pieces: Many[Piece], seconds: float) -> None:
        """Count the time of a step of new tokens."""
        guesses = sum(len(piece.guesses) for piece in pieces)
        self._times.add(len(pieces) + guesses, seconds, guesses=guesses > 0)

    def _state(self, sequence: Sequence) -> _State:
        """Return the state of a sequence, after a test of the last guess that was not computed."""
        state = self._states.setdefault(sequence, _State(Rate(self._rate.value)))
        if state.test is not None and state.test[0] < len(sequence.tokens):
            place, token = state.test
            right = sequence.tokens[place] == token
            state.rate.add(int(right), not right)
            state.test = None
        return state

    def _proposed(self, wanted: Mapping[Sequence, int]) -> list[list[int]]:
        """Return guesses for sequences, given the maximum number of each."""
        begun = time.perf_counter()
        requests = [Wanted(sequence, sequence.tokens, most) for sequence, most in wanted.items()]
        proposals = self._drafter.propose(requests) if requests else []
        seconds = time.perf_counter() - begun
        most = max(map(len, proposals), default=0)
        if most and not any(self._states[sequence].steps for sequence in wanted):
            times = self._times_of_guesses.setdefault(size_for(len(wanted)), deque(maxlen=_TIMES))
            times.append(seconds / most)
        return proposals

    def _per_guess(self, sequences: int) -> float:
        """Return the time to guess one more token of a number of sequences."""
        times = self._times_of_guesses.get(size_for(sequences), ())
        measured = not self._drafter.free and len(times) >= _FEWEST_TIMES
        return median_low(times) if measured else 0.0
