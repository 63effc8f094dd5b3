"""Measurements for Prometheus. None of them contains a text of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily

from tpcompile.serving.engine import Engine

_FIRST = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_NEXT = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)


class _Restarts:
    """The collector of restarts, which the engine counts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily]:
        text = "Times that the ranks were started again"
        yield CounterMetricFamily("tpcompile_restarts", text, value=self._engine.restarts)


class Metrics:
    """The measurements of one server."""

    def __init__(self, engine: Engine) -> None:
        registry = self._registry = CollectorRegistry()
        scheduler = engine.scheduler
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter("tpcompile_requests", "Answered requests", ["path", "status"])
        self.prompt = counter("tpcompile_prompt_tokens", "Tokens of prompts")
        self.shared = counter("tpcompile_prefix_hit_tokens", "Tokens of prompts found in the cache")
        self.calls = counter("tpcompile_tool_calls", "Calls of tools in answers of chats")
        self.failures = counter(
            "tpcompile_failures", "Answers that could not be made, by kind", ["kind"]
        )
        """Failures within a request. A feature that may fail has a kind of its own."""
        self.new = counter("tpcompile_new_tokens", "New tokens")
        self.first = histogram(
            "tpcompile_first_token_seconds", "Time to the first token", buckets=_FIRST
        )
        self.next = histogram(
            "tpcompile_next_token_seconds", "Time per further token", buckets=_NEXT
        )

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"tpcompile_{name}", text, registry=registry).set_function(value)

        gauge("requests_running", "Sequences that run", lambda: len(scheduler.running))
        gauge("requests_waiting", "Sequences that wait", lambda: len(scheduler.waiting))
        gauge("blocks", "Blocks of the KV cache", lambda: scheduler.blocks.count)
        gauge("blocks_used", "Blocks that sequences hold", lambda: scheduler.blocks.held)
        gauge(
            "blocks_kept",
            "Blocks whose contents may be shared later",
            lambda: scheduler.blocks.kept,
        )
        gauge("states", "States of linear attention", lambda: scheduler.states.count)
        gauge("states_used", "States that sequences hold", lambda: scheduler.states.held)
        gauge("states_kept", "Snapshots that no sequence holds", lambda: scheduler.states.kept)
        gauge("engine_steps", "Steps of the engine", lambda: engine.steps)
        gauge("program_steps", "Runs of programs", lambda: engine.model.steps.program)
        gauge("module_steps", "Runs of torch modules", lambda: engine.model.steps.modules)
        gauge("drafted_tokens", "Guessed tokens", lambda: engine.model.steps.drafted)
        gauge("accepted_tokens", "Right guesses", lambda: engine.model.steps.accepted)
        registry.register(_Restarts(engine))

    def text(self) -> bytes:
        """Return all measurements in Prometheus' format."""
        return generate_latest(self._registry)
