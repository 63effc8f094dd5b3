"""The record of a request: its sizes, times and status, for the log and the measurements.

It has no text of the request.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpcompile.serving.requests import Handle
from tpcompile.serving.server.metrics import Metrics

log = logging.getLogger(__name__)


@dataclass
class Record:
    """The sizes and times of a request, which begin when the request arrives."""

    metrics: Metrics
    path: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    begun: float = field(default_factory=time.perf_counter)
    handles: Sequence[Handle] = ()
    """The prompts of the request, as the engine has them."""
    new: int = 0
    """The number of new tokens."""
    first: float | None = None
    """The time of the first token."""

    def watch(self) -> Watch:
        """Return the recorder of a continuation's tokens."""
        return Watch(self)

    def add(self, handles: Sequence[Handle]) -> None:
        """Count the tokens of the prompts."""
        self.handles = handles
        self.metrics.prompt.inc(self._prompts)

    def end(self, status: int) -> None:
        """Count and log the request."""
        shared = sum(handle.shared for handle in self.handles)
        self.metrics.shared.inc(shared)
        self.metrics.requests.labels(self.path, str(status)).inc()
        log.info(
            "id=%s path=%s status=%d prompt_tokens=%d cached_tokens=%d new_tokens=%d "
            "first_token_s=%s total_s=%.3f",
            *(self.id, self.path, status, self._prompts, shared, self.new),
            "-" if self.first is None else f"{self.first - self.begun:.3f}",
            time.perf_counter() - self.begun,
        )

    @property
    def _prompts(self) -> int:
        return sum(len(handle.prompt) for handle in self.handles)


class Watch:
    """The times of the tokens of a continuation."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._last: float | None = None

    def token(self) -> None:
        """Record a new token."""
        now, record, metrics = time.perf_counter(), self._record, self._record.metrics
        if self._last is None:
            metrics.first.observe(now - record.begun)
        else:
            metrics.next.observe(now - self._last)
        metrics.new.inc()
        record.new += 1
        record.first = now if record.first is None else record.first
        self._last = now
