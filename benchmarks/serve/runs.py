"""A trace run by the scheduler under a virtual clock, or by an engine under a real one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from benchmarks.serve.prices import Prices
from benchmarks.serve.trace import Arrival
from tpcompile.serving import SamplingParams
from tpcompile.serving.plan import Limits, Sequence
from tpcompile.serving.scheduler import Scheduler


@dataclass
class Outcome:
    """The times of all requests of a run, in seconds."""

    firsts: list[float] = field(default_factory=list)
    """From arrival to the first token."""
    nexts: list[float] = field(default_factory=list)
    """Per further token, by request."""
    tokens: int = 0
    shared: int = 0
    prompts: int = 0
    preempted: int = 0
    blocks: int = 0
    """The most blocks that were held."""
    steps: int = 0
    seconds: float = 0.0
    """The time of the run on its own clock."""
    work: float = 0.0
    """The time of the steps."""

    def ended(self, arrived: float, first: float, last: float, new: int) -> None:
        """Record a request that has ended."""
        self.firsts.append(first - arrived)
        self.tokens += new
        if new > 1:
            self.nexts.append((last - first) / (new - 1))

    @property
    def per_token(self) -> float:
        """The mean time per further token."""
        return mean(self.nexts) if self.nexts else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": len(self.firsts),
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens / self.seconds, 2) if self.seconds else 0.0,
            "busy": round(self.work / self.seconds, 4) if self.seconds else 0.0,
            "first_token_s": {q: round(part(self.firsts, q), 4) for q in (50, 95, 99)},
            "next_token_s": {q: round(part(self.nexts, q), 5) for q in (50, 95, 99)},
            "per_token_s": round(self.per_token, 5),
            "prefix_hits": round(self.shared / max(1, self.prompts), 4),
            "preempted": self.preempted,
            "most_blocks": self.blocks,
        }


def part(values: list[float], percent: int) -> float:
    """Return a percentile."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0


@dataclass(slots=True)
class _Running:
    arrival: Arrival
    first: float = 0.0


def simulate(
    trace: Iterable[Arrival],
    limits: Limits,
    prices: Prices,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Run a trace by the scheduler; each step takes its price."""
    scheduler, outcome = Scheduler(limits), Outcome()
    running: dict[Sequence, _Running] = {}
    coming, now = iter(trace), 0.0
    head = next(coming, None)
    while head is not None or running:
        while head is not None and head.at_s <= now:
            running[scheduler.add(head.tokens)] = _Running(head)
            head = next(coming, None)
        plan = scheduler.plan()
        if not plan:
            if head is None:
                raise RuntimeError("the scheduler has nothing to do, but requests are left")
            now = head.at_s
            continue
        spent = prices.of(plan)
        now += spent
        outcome.work += spent
        outcome.steps += 1
        outcome.preempted += len(plan.preempted)
        outcome.blocks = max(outcome.blocks, scheduler.blocks.held)
        scheduler.done(plan.pieces)
        for sequence in plan.complete:
            request = running[sequence]
            arrival = request.arrival
            if len(sequence.tokens) == len(arrival.tokens):
                request.first = now
                outcome.shared += sequence.shared
                outcome.prompts += len(arrival.tokens)
            scheduler.append(sequence, 0)
            new = len(sequence.tokens) - len(arrival.tokens)
            if new == arrival.new:
                scheduler.end(sequence)
                del running[sequence]
                outcome.ended(arrival.at_s, request.first, now, new)
                progress(len(outcome.firsts))
    outcome.seconds = now
    return outcome


def measure(trace: Iterable[Arrival], engine: Any) -> Outcome:
    """Run a trace by an engine, as fast as the requests arrive."""
    outcome = Outcome()
    handles: list[Any] = []
    coming = iter(trace)
    head = next(coming, None)
    begun = time.perf_counter()
    open_: list[list[Any]] = []
    while head is not None or open_:
        now = time.perf_counter() - begun
        while head is not None and head.at_s <= now:
            params = SamplingParams(max_tokens=head.new, ignore_eos=True)
            handle = engine.add(head.tokens, params)
            handles.append(handle)
            open_.append([handle, head, 0.0, 0])
            head = next(coming, None)
        started = time.perf_counter()
        if not engine.step():
            if head is not None:
                time.sleep(max(0.0, head.at_s - (time.perf_counter() - begun)))
            continue
        now = time.perf_counter() - begun
        outcome.work += time.perf_counter() - started
        outcome.steps += 1
        outcome.blocks = max(outcome.blocks, engine.scheduler.blocks.held)
        for request in list(open_):
            _take(request, now, outcome, open_)
    outcome.seconds = time.perf_counter() - begun
    outcome.shared = sum(handle.shared for handle in handles)
    return outcome


def _take(request: list[Any], now: float, outcome: Outcome, open_: list[list[Any]]) -> None:
    """Take the events of a request."""
    handle, arrival, first, new = request
    for event in handle.ready():
        new += 1
        first = first or now
        if event.finish:
            outcome.ended(arrival.at_s, first, now, new)
            outcome.prompts += len(arrival.tokens)
            open_.remove(request)
    request[2:] = [first, new]
