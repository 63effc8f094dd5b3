"""Sides that decode blocks of steps in pairs: alone, and in a condition."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from statistics import median

from rich.console import Console

from benchmarks.bandwidth import ReadLoop
from benchmarks.checkpoint import RandomCheckpoint
from benchmarks.contend.conditions import OURS, QUOTA, Condition
from benchmarks.contend.disturbances import LeftCoresError, Quota, QuotaError, busy, restricted
from benchmarks.contend.figures import Block, Measured, Pair, Series
from benchmarks.peers.kinds import Written
from benchmarks.peers.side import NotInstalledError, Side, SideError, SideSpec
from benchmarks.serve.agreement import gaps

READS = 5
"""Readings of the read loop before and after a pair, of which the median counts."""
TRIES = 3
"""The most pairs that are measured, for each pair that shall count."""


@dataclass(frozen=True)
class Work:
    """What a block is: steps after a context, and the number of pairs."""

    context: int
    steps: int
    pairs: int


@dataclass
class Started:
    """A side: the process that decodes alone and, if the condition needs one, a second."""

    plain: Side
    second: Side | None = None

    @property
    def sides(self) -> list[Side]:
        return [self.plain, self.second] if self.second else [self.plain]


@dataclass
class Contention:
    """The sides of one checkpoint, and everything measured with them."""

    checkpoint: RandomCheckpoint
    measured: Measured
    work: Work
    progress: Console
    sides: dict[str, Side] = field(default_factory=dict)
    texts: dict[str, dict[tuple[int, ...], Written]] = field(default_factory=dict)
    """The different continuations of each side."""

    def __post_init__(self) -> None:
        self._read = ReadLoop(self.checkpoint.weight_bytes)
        dice = Random(0)
        size = self.checkpoint.vocabulary
        self.prompt = [dice.randrange(size) for _ in range(self.work.context)]

    def start(self, chosen: Sequence[SideSpec], stack: ExitStack) -> None:
        """Load the sides one after another."""
        for spec in chosen:
            if (side := self._load(spec, stack)) is not None:
                self.sides[spec.name] = side

    def measure(self, condition: Condition) -> None:
        """Measure pairs of all sides, in turn unless the condition needs a second process."""
        with ExitStack() as stack:
            quota = None
            if condition.quota:
                try:
                    quota = stack.enter_context(Quota(QUOTA))
                except QuotaError as error:
                    self.measured.impossible[condition.name] = str(error)
                    return
            names = list(self.sides)
            # second processes need memory, so they run for one side after another
            for group in [[name] for name in names] if condition.second else [names]:
                with ExitStack() as inner:
                    chosen = self._chosen(group, condition, quota, inner)
                    self._pairs(chosen, condition, quota)

    def judge(self) -> None:
        """Compare all continuations with those of the model in fp32."""
        texts = {side: list(continuations.values()) for side, continuations in self.texts.items()}
        if not texts:
            return
        most = max(map(len, texts.values()))
        results = {name: (continuations * most)[:most] for name, continuations in texts.items()}
        prompts = [self.prompt] * most
        largest_gaps, allowed = gaps(
            self.checkpoint.directory, prompts, results, self.measured.cores
        )
        self.measured.gaps = {name: [gap, allowed] for name, gap in largest_gaps.items()}

    def _load(self, spec: SideSpec, stack: ExitStack) -> Side | None:
        self.progress.print(f"loading {spec.name}")
        side = stack.enter_context(Side(spec, self.checkpoint.directory))
        try:
            side.ready()
            self._block(side)  # warms up
        except SideError as error:
            self._lose(spec.name, error)
            return None
        return side

    def _lose(self, name: str, error: Exception) -> None:
        installed = not isinstance(error, NotInstalledError)
        where = self.measured.missing if installed else self.measured.not_installed
        where[name] = str(error)
        self.sides.pop(name, None)

    def _chosen(
        self, names: Sequence[str], condition: Condition, quota: Quota | None, stack: ExitStack
    ) -> dict[str, Started]:
        """Return the sides, with second processes if the condition needs them."""
        chosen = {}
        for name in names:
            started = Started(self.sides[name])
            if condition.second:
                spec = within(started.plain.spec, condition, quota)
                started.second = self._load(spec, stack)
                if started.second is None:
                    continue
            chosen[name] = started
        return chosen

    def _pairs(self, chosen: dict[str, Started], condition: Condition, quota: Quota | None) -> None:
        series = {name: Series(condition.name, name) for name in chosen}
        self.measured.series += series.values()
        for _ in range(TRIES * self.work.pairs):
            for name, started in list(chosen.items()):
                if len(series[name].counted) == self.work.pairs:
                    continue
                try:
                    pair = self._pair(started, condition, quota)
                except (SideError, LeftCoresError) as error:
                    self._lose(name, error)
                    del chosen[name]
                    continue
                series[name].pairs.append(pair)
                self._tell(condition, name, pair)

    def _tell(self, condition: Condition, name: str, pair: Pair) -> None:
        verdict = "" if pair.counts else ", does not count: the read loop differs"
        self.progress.print(
            f"{condition.title}, {name}: {pair.ratio(condition):.2f} ×; read loop "
            f"{pair.before / 1e9:.1f} and {pair.after / 1e9:.1f} GB/s{verdict}"
        )

    def _pair(self, started: Started, condition: Condition, quota: Quota | None) -> Pair:
        before = self._bandwidth()
        twins = started.sides if condition.twin else []
        alone = [self._block(side) for side in twins or [started.plain]]
        with disturbed(started.plain.pid, condition, quota):
            loaded = self._together(twins) if twins else [self._block(started.sides[-1])]
        return Pair(alone, loaded, before, self._bandwidth())

    def _bandwidth(self) -> float:
        return median(self._read.bandwidth(self.measured.cores) for _ in range(READS))

    def _together(self, sides: Sequence[Side]) -> list[Block]:
        """Let twins write at the same time. Return one block of each, all beside the other twin."""
        done: list[Side] = []

        def first(side: Side) -> Block:
            try:
                block = self._block(side)
            finally:
                done.append(side)
            while len(done) < len(sides):  # keep the slower one company
                self._block(side)
            return block

        with ThreadPoolExecutor(len(sides)) as pool:
            return list(pool.map(first, sides))

    def _block(self, side: Side) -> Block:
        """Continue the prompt; return the times between tokens, of which the first ends it."""
        tokens, times = side.write(self.prompt, self.work.steps + 1)
        self.texts.setdefault(side.spec.name, {})[tuple(tokens)] = (tokens, times)
        return [end - begin for begin, end in pairwise(times)]


@contextmanager
def disturbed(process: int, condition: Condition, quota: Quota | None) -> Iterator[None]:
    """Cause a condition for the time of a block; `process` decodes alone."""
    with ExitStack() as stack:
        if not condition.loads_within:
            if quota is not None:
                stack.enter_context(quota.around(process))
            if condition.one_core:
                stack.enter_context(restricted([process], one_core()))
        stack.enter_context(busy(condition.busy))
        yield


def one_core() -> tuple[int, ...]:
    """Return the last core of this process: interrupts are often handled by the first."""
    return (max(os.sched_getaffinity(0)),)


def within(spec: SideSpec, condition: Condition, quota: Quota | None) -> SideSpec:
    """Return the spec of the second process, which may load within the condition.

    Peers get as many threads as the process has cores. tpcompile chooses itself.
    """
    if not condition.loads_within:
        return spec
    if quota is not None:
        return replace(spec, group=str(quota.directory))
    threads = spec.threads if spec.name in OURS else 1
    return replace(spec, cores=one_core(), threads=threads)
