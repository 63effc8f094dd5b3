"""Errors of a callback that are raised after the ranks have answered."""

from __future__ import annotations

from types import TracebackType

import torch

from tpcompile.backends.executor import OnTokens
from tpcompile.runtime.ranks.worker import Progress


class Later:
    """A context that calls `on_tokens`, and raises its first error at the end.

    An error in the middle of a launch would leave the ranks out of step with their caller.
    """

    def __init__(self, on_tokens: OnTokens | None) -> None:
        self._on_tokens = on_tokens
        self._error: BaseException | None = None

    @property
    def callback(self) -> OnTokens | None:
        """The callback that never raises; None if there is no callback."""
        return None if self._on_tokens is None else self._call

    def receive(self, report: Progress) -> None:
        """Pass on the tokens of a worker's report."""
        assert report.tokens is not None
        self._call(report.tokens)

    def _call(self, tokens: torch.Tensor) -> None:
        if self._on_tokens is None or self._error is not None:
            return
        try:
            self._on_tokens(tokens)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Later:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._error is not None:
            raise self._error
