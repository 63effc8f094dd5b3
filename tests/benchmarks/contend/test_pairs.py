"""Pairs are measured in turn, again if the machine changed, and never without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.checkpoint import RandomCheckpoint
from benchmarks.contend import pairs as under_test
from benchmarks.contend.conditions import BY_NAME, LAUNCHES, TOKENS, Condition
from benchmarks.contend.disturbances import QuotaError
from benchmarks.contend.figures import Measured
from benchmarks.contend.pairs import READS, TRIES, Contention, Work, one_core, within
from benchmarks.decode_measured import LLAMA, OPENVINO
from benchmarks.peers.side import NotInstalledError, SideError, SideSpec

CHECKPOINT = RandomCheckpoint(Path("nowhere"), 2, 1013, torch.bfloat16, 1000, (1, 1))
NICE_0, TWIN = BY_NAME["nice-0"], BY_NAME["two-at-once"]
STEPS = 3


class _Read:
    """A read loop that returns given numbers, each for all readings of one call."""

    def __init__(self, numbers: Iterator[float]) -> None:
        self._numbers = chain.from_iterable(repeat(number, READS) for number in numbers)

    def bandwidth(self, threads: int) -> float:
        return next(self._numbers)


class _Side:
    """Fake side that logs its calls. Each step takes a second, or two if it is disturbed."""

    log: list[str]
    disturbed: list[str]
    fails: str = ""
    barrier: Barrier | None = None

    def __init__(self, spec: SideSpec, directory: Path) -> None:
        self.spec, self.pid = spec, 1

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *_: Any) -> None:
        self.log.append(f"close {self.spec.name}")

    def ready(self) -> list[int]:
        if self.spec.name == LLAMA:
            raise NotInstalledError("no package")
        return [1]

    def write(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]:
        if self.fails == self.spec.name:
            raise SideError("it fell")
        assert len(prompt) == 5 and new == STEPS + 1
        disturbed = bool(self.disturbed)
        self.log.append(f"{self.spec.name}{', disturbed' * disturbed}")
        if self.barrier is not None and disturbed:
            self.barrier.wait(60)
        return [7] * new, [float((1 + disturbed) * number) for number in range(new)]


@pytest.fixture
def contention(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Contention]:
    """Make a contention of fake sides; `reads` are the results of the read loop."""

    def made(pairs: int, names: Sequence[str], reads: Iterator[float]) -> Contention:
        _Side.log, _Side.disturbed, _Side.fails, _Side.barrier = [], [], "", None
        monkeypatch.setattr(under_test, "Side", _Side)
        monkeypatch.setattr(under_test, "ReadLoop", lambda size: _Read(reads))
        monkeypatch.setattr(under_test, "disturbed", _disturbed)
        benchmark = Contention(
            CHECKPOINT, Measured("tiny-qwen3", 2), Work(5, STEPS, pairs), Console(quiet=True)
        )
        benchmark.start([SideSpec(name, "eager", 1, 2) for name in names], ExitStack())
        _Side.log.clear()
        return benchmark

    return made


@contextmanager
def _disturbed(process: int, condition: Condition, quota: Any) -> Iterator[None]:
    _Side.disturbed.append(condition.name)
    yield
    _Side.disturbed.clear()


def test_sides_take_turns_in_adjacent_pairs(contention: Callable[..., Contention]) -> None:
    benchmark = contention(2, [LAUNCHES, TOKENS], repeat(30.0))
    benchmark.measure(NICE_0)
    turn = [LAUNCHES, f"{LAUNCHES}, disturbed", TOKENS, f"{TOKENS}, disturbed"]
    assert _Side.log == turn * 2
    first, second = benchmark.measured.series
    assert (first.side, second.side) == (LAUNCHES, TOKENS)
    assert first.ratio == second.ratio == 2.0
    assert first.pairs[0].alone == [[1.0] * STEPS] and first.pairs[0].loaded == [[2.0] * STEPS]
    assert benchmark.texts[LAUNCHES].keys() == {(7,) * (STEPS + 1)}


def test_a_pair_that_does_not_count_is_measured_again(
    contention: Callable[..., Contention],
) -> None:
    reads = chain([30.0, 30.0, 30.0, 20.0], repeat(20.0))  # the second pair is dropped
    benchmark = contention(2, [LAUNCHES], reads)
    benchmark.measure(NICE_0)
    (series,) = benchmark.measured.series
    assert [pair.counts for pair in series.pairs] == [True, False, True]
    assert series.dropped == 1


def test_an_unsteady_machine_ends_the_tries(contention: Callable[..., Contention]) -> None:
    benchmark = contention(2, [LAUNCHES], iter([10.0, 20.0] * 2 * TRIES))
    benchmark.measure(NICE_0)
    (series,) = benchmark.measured.series
    assert series.dropped == len(series.pairs) == 2 * TRIES
    assert series.ratio is None


def test_twins_write_at_the_same_time(contention: Callable[..., Contention]) -> None:
    benchmark = contention(1, [LAUNCHES], repeat(30.0))
    # the first blocks meet; the faster twin may add others, to keep the slower one company
    _Side.barrier = Barrier(2, action=lambda: setattr(_Side, "barrier", None))
    benchmark.measure(TWIN)
    (pair,) = benchmark.measured.series[0].pairs
    assert pair.alone == [[1.0] * STEPS] * 2 and pair.loaded == [[2.0] * STEPS] * 2
    assert _Side.log[1:3] == [LAUNCHES] * 2  # after the second process has warmed up
    assert _Side.log[-1] == f"close {LAUNCHES}" and LAUNCHES in benchmark.sides


def test_a_side_that_fails_is_not_asked_again(contention: Callable[..., Contention]) -> None:
    benchmark = contention(2, [LAUNCHES, TOKENS, LLAMA], repeat(30.0))
    _Side.fails = TOKENS
    benchmark.measure(NICE_0)
    assert benchmark.measured.missing == {TOKENS: "it fell"} and list(benchmark.sides) == [LAUNCHES]
    assert benchmark.measured.not_installed == {LLAMA: "no package"}
    _Side.fails = LAUNCHES
    benchmark.measure(TWIN)  # the second process fails
    assert benchmark.measured.missing[LAUNCHES] == "it fell" and not benchmark.sides


def test_an_impossible_quota_is_named(
    contention: Callable[..., Contention], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cores: float) -> None:
        raise QuotaError("no cgroup")

    benchmark = contention(1, [LAUNCHES], repeat(30.0))
    monkeypatch.setattr(under_test, "Quota", refuse)
    benchmark.measure(BY_NAME["quota"])
    assert benchmark.measured.impossible == {"quota": "no cgroup"}
    assert not benchmark.measured.series and not _Side.log


def test_a_second_process_loads_within_the_condition() -> None:
    one_core_condition = BY_NAME["one-core"]
    ours, peer = SideSpec(LAUNCHES, "eager", 1, 2), SideSpec(OPENVINO, "openvino", 1, 2)
    placed = within(peer, one_core_condition, None)
    assert (placed.cores, placed.threads) == (one_core(), 1)
    assert within(ours, one_core_condition, None).threads == 2  # it chooses itself
    assert within(ours, TWIN, None) == ours
