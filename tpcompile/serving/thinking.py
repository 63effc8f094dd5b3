"""Limits of thinking: forced tokens at its beginning and end."""

from __future__ import annotations

from dataclasses import dataclass

from tpcompile.errors import UsageError


@dataclass(frozen=True)
class ThinkingRules:
    """The tokens of a request's thinking, and its maximum length."""

    begin: int
    """The token with which the model begins to think."""
    end: int
    """The token with which it ends."""
    begun: bool = False
    """Whether the prompt ends within the thinking."""
    required: bool = False
    """Whether the first new token is `begin`. It has no effect if the thinking has begun."""
    budget: int | None = None
    """The maximum number of tokens of thinking, without its marks."""
    closing: tuple[int, ...] = ()
    """The tokens that follow when the budget is used up; empty: only `end`."""

    def __post_init__(self) -> None:
        budget = self.budget
        whole = isinstance(budget, int) and not isinstance(budget, bool)
        if budget is not None and not (whole and budget >= 0):
            raise UsageError(
                f"A budget of thinking must be an integer of at least 0, got {budget!r}"
            )
        if self.closing and self.end not in self.closing:
            raise UsageError(
                "The closing tokens of thinking must contain its end",
                got=f"{self.closing}, and the end {self.end}",
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens that the rules name."""
        return self.begin, self.end, *self.closing


class Thinking:
    """The thinking of one continuation: tokens that are forced, by the rules and new tokens."""

    def __init__(self, rules: ThinkingRules) -> None:
        self._rules = rules
        self._forced: list[int] = []
        """The tokens that come next, last first."""
        self._left: int | None = None
        """The tokens left in the budget; None outside of the thinking, or without a budget."""
        self._over = False
        """Whether the thinking has ended, or its end is forced."""
        if rules.begun:
            self._begin()
        elif rules.required:
            self._forced = [rules.begin]

    @property
    def forced(self) -> int | None:
        """The next token; None if the model chooses it."""
        return self._forced[-1] if self._forced else None

    def read(self, token: int) -> None:
        """Read a new token."""
        if self._forced:
            self._forced.pop()
        if self._over:
            return
        if token == self._rules.end:
            self._over = True
        elif self._left is not None:
            self._left -= 1
            self._close_if_used_up()
        elif token == self._rules.begin:
            self._begin()

    def _begin(self) -> None:
        self._left = self._rules.budget
        self._close_if_used_up()

    def _close_if_used_up(self) -> None:
        if self._left == 0:
            self._over = True
            self._forced = [*reversed(self._rules.closing or (self._rules.end,))]
