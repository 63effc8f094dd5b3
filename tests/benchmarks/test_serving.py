"""Tests of the serving benchmark: traces, prices and both kinds of runs. No time is asserted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

import tpcompile
from benchmarks import serving
from benchmarks.serve.prices import Prices, Recorder, from_model, from_schedules
from benchmarks.serve.runs import Outcome, measure, part, simulate
from benchmarks.serve.trace import Load, arrivals
from tests.runtime.eager_pair import lively
from tpcompile.serving.plan import Limits, Piece, Plan, Sequence
from tpcompile.vm.targets import TARGETS

FLAT = Prices({b: [(0.0, 0.01), (100.0, 0.01)] for b in (1, 2, 4, 8)}, (0.02, 0.0, 0.0))
LIMITS = Limits(40, 32, 4, 512, 128)


def test_a_trace_comes_from_its_seed() -> None:
    load = Load(50, 2.0, 100, 20, prefix=40, groups=2, seed=3)
    requests = list(arrivals(load, 300))
    assert requests == list(arrivals(load, 300)) and len(requests) == 50
    assert all(a.at_s < b.at_s for a, b in itertools.pairwise(requests))
    assert all(
        request.new >= 1 and len(request.tokens) + request.new <= 300 for request in requests
    )
    assert len({tuple(request.tokens[:40]) for request in requests}) == 2


def test_prices_between_contexts() -> None:
    prices = Prices(
        {1: [(0.0, 1.0), (100.0, 3.0)], 2: [(0.0, 2.0), (100.0, 2.0)]}, (1.0, 0.1, 0.01)
    )
    first, second = (Sequence((n, n), [1] * 51) for n in range(2))
    decode = Plan([Piece(first, 50, 1)], [], [], [])
    assert prices.of(decode) == pytest.approx(2.0)
    mixed = Plan([Piece(first, 50, 1), Piece(second, 50, 1)], [Piece(first, 10, 20)], [], [])
    assert prices.of(mixed) == pytest.approx(2.0 + 1.0 + 20 * (0.1 + 0.1))


def test_a_simulated_request_takes_its_steps() -> None:
    """The chunks of a prompt share a run, because 512 tokens fit; then each token takes a step."""
    load = Load(1, 1.0, 300, 5, seed=1)
    (only,) = arrivals(load, 1000)
    assert 128 < len(only.tokens) <= 512 and len(only.tokens) % 128 >= 16
    simulated = simulate([only], LIMITS, FLAT)
    assert simulated.firsts == [pytest.approx(0.02)]
    assert simulated.steps == only.new
    if only.new > 1:
        assert simulated.nexts == [pytest.approx(0.01)]
    assert simulated.tokens == only.new


def test_a_simulated_load_ends_and_shares_prefixes() -> None:
    load = Load(300, 50.0, 50, 10, prefix=128, groups=2, seed=2)
    simulated = simulate(arrivals(load, 320), LIMITS, FLAT)
    assert len(simulated.firsts) == 300 and simulated.blocks <= 40
    assert simulated.shared > 0.4 * simulated.prompts
    assert simulated.tokens == sum(request.new for request in arrivals(load, 320))
    assert simulated.work <= simulated.seconds


def test_prices_of_a_target() -> None:
    prices = from_schedules("preset:tiny-qwen3", TARGETS["h200"], 4, 256, lambda text: None)
    assert sorted(prices.decode) == [1, 2, 3, 4]
    for points in prices.decode.values():
        assert [context for context, _ in points] == [64, 256]
        assert 0 < points[0][1] <= points[1][1]
    assert all(part > 0 for part in prices.chunk)


def test_a_measured_load() -> None:
    load = Load(6, 1000.0, 40, 6, seed=4)
    with (
        tpcompile.compile(lively("tiny-qwen3"), max_seq_len=128) as model,
        tpcompile.Engine(model, max_batch=4) as engine,
    ):
        prices = from_model(engine, [32, 63])
        recorder = Recorder(model)
        measured = measure(arrivals(load, 128), engine)
        wanted = sum(request.new for request in arrivals(load, 128))
        assert (len(measured.firsts), measured.tokens) == (6, wanted)
        assert measured.work > 0 and measured.blocks > 0
        for price_table in (prices, recorder.prices()):
            again = simulate(arrivals(load, 128), engine.scheduler.limits, price_table)
            assert again.tokens == wanted


def test_percentiles() -> None:
    assert [part([float(n) for n in range(100)], q) for q in (50, 95, 99)] == [50, 95, 99]
    assert Outcome().to_json()["tokens_per_s"] == 0


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = "--simulate --model preset:tiny-qwen3 --requests 40 --batch 4 --longest 300 --json"
    assert serving.main(line.split()) == 0
    report = json.loads(capsys.readouterr().out)["simulated"]
    assert (
        report["requests"] == 40 and report["first_token_s"]["99"] >= report["first_token_s"]["50"]
    )
    assert serving.main(["--simulate", "--target", "nothing"]) == 2
    assert "no target 'nothing'" in capsys.readouterr().err
