"""Requests: the handles of callers, and the events that they receive."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from tpcompile.serving.params import SamplingParams
from tpcompile.serving.sampling import Chosen

STOP, LENGTH, ABORT = "stop", "length", "abort"
"""The reasons why a continuation ends."""


@dataclass(frozen=True)
class Event:
    """A new token of a continuation, or its end."""

    index: int
    """The number of the continuation."""
    chosen: Chosen | None
    """None if no token was added, as when a request is aborted."""
    text: str = ""
    """The text that became complete; empty without a tokenizer."""
    finish: str | None = None
    """The reason for which the continuation has ended: "stop", "length" or "abort"."""


@dataclass
class Completion:
    """A continuation."""

    index: int
    chosen: list[Chosen] = field(default_factory=list)
    text: str = ""
    finish: str | None = None

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return [choice.token for choice in self.chosen]

    def add(self, event: Event) -> None:
        """Add an event."""
        if event.chosen is not None:
            self.chosen.append(event.chosen)
        self.text += event.text
        self.finish = event.finish


class Handle:
    """A request that was added to an engine: iterate over its events, or ask for the result.

    `for` and `result` run the engine if no thread does. `async for` and `await` start its thread.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        drive: Callable[[], bool],
        start: Callable[[], object],
        abort: Callable[[Handle, int | None], None],
    ) -> None:
        self.prompt, self.params = prompt, params
        self.shared = 0
        """The tokens of the prompt that were in the cache already."""
        self.drafted, self.accepted = 0, 0
        """The computed guesses, and the accepted ones among them."""
        self.prompt_chosen: list[Chosen] = []
        """The tokens of the prompt from the second on, if `prompt_logprobs` asks for them."""
        self._drive, self._start, self._abort = drive, start, abort
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._left = params.n
        self._wake: Callable[[], None] | None = None

    def abort(self, index: int | None = None) -> None:
        """End the request, or one of its continuations. Blocks are free after the current step."""
        self._abort(self, index)

    @property
    def ended(self) -> bool:
        """Whether all events have been taken."""
        return not self._left

    def result(self) -> list[Completion]:
        """Wait for the end; return all continuations."""
        completions = [Completion(index) for index in range(self.params.n)]
        for event in self:
            completions[event.index].add(event)
        return completions

    def ready(self) -> Iterator[Event]:
        """Take the pending events, without waiting."""
        while self._left and not self._events.empty():
            yield self._next()

    def __iter__(self) -> Iterator[Event]:
        while self._left:
            while self._events.empty() and self._drive():
                pass
            yield self._next()

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(ready.set)

        self._wake = wake
        self._start()
        while self._left:
            while self._events.empty():
                ready.clear()
                if self._events.empty():
                    await ready.wait()
            yield self._next()

    def __await__(self) -> object:
        return self._collected().__await__()

    async def _collected(self) -> list[Completion]:
        completions = [Completion(index) for index in range(self.params.n)]
        async for event in self:
            completions[event.index].add(event)
        return completions

    def _next(self) -> Event:
        event = self._events.get()
        if isinstance(event, BaseException):
            self._left = 0
            raise event
        self._left -= event.finish is not None
        return event

    def put(self, event: Event | BaseException) -> None:
        """Pass on an event; the engine calls this, in any thread."""
        self._events.put(event)
        if self._wake is None:
            return
        try:
            self._wake()
        except RuntimeError:  # the caller's event loop is closed
            self._wake = None
