"""Requests survive the death of a rank, and a change of tp, with the tokens of a quiet run."""

from __future__ import annotations

import os
import signal
import threading
import time
from random import Random
from typing import Any

import pytest

import tpcompile
from tests.runtime.eager_pair import lively
from tests.serving.test_engine import greedy, prompt
from tpcompile import api
from tpcompile.frontend import capture
from tpcompile.serving import Engine
from tpcompile.serving.runs import Runs

pytestmark = pytest.mark.usefixtures("forked_launchers")

STREAMS = 8
ASKED = [prompt(Random(n), 3 + 9 * n) for n in range(STREAMS)]
PARAMS = [greedy(24, **({"temperature": 0.9, "seed": n} if n % 2 else {})) for n in range(STREAMS)]
OPTIONS: dict[str, Any] = {"max_batch": 5, "chunk": 32, "max_tokens_per_step": 64}


def made(eager: Any, tp: int) -> tpcompile.CompiledModel:
    return tpcompile.compile(eager, tp, max_seq_len=128, isolate=True)


def streamed(engine: Engine) -> list[list[int]]:
    handles = [engine.add(*asked) for asked in zip(ASKED, PARAMS, strict=True)]
    return [handle.result()[0].tokens for handle in handles]


def disturbed(engine: Engine, dice: Random) -> list[list[int]]:
    """Stream all requests, and kill a rank at some moment."""
    found: list[list[int]] = []
    running = threading.Thread(target=lambda: found.extend(streamed(engine)))
    running.start()
    time.sleep(dice.random() * 0.3)
    if running.is_alive():
        os.kill(dice.choice(engine.model.processes), signal.SIGKILL)
    running.join()
    return found


def killed(tp: int, kills: int) -> None:
    eager, dice = lively("tiny-qwen3"), Random(tp)
    with made(eager, tp) as model, Engine(model, **OPTIONS) as engine:
        wanted = streamed(engine)
    engine = Engine(made(eager, tp), **OPTIONS).start()
    try:
        died = 0
        while died < kills:
            before = engine.restarts
            assert disturbed(engine, dice) == wanted
            died += engine.restarts > before
    finally:
        engine.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_is_killed(tp: int) -> None:
    killed(tp, 2)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_are_killed_a_hundred_times(tp: int) -> None:
    killed(tp, 50)


def test_another_tp_while_requests_run() -> None:
    eager = lively("tiny-qwen3")
    with made(eager, 1) as model, Engine(model, **OPTIONS) as engine:
        wanted = streamed(engine)
        handles = [engine.add(*asked) for asked in zip(ASKED, PARAMS, strict=True)]
        for _ in range(9):
            engine.step()
        engine.restart(tp=3)
        assert [handle.result()[0].tokens for handle in handles] == wanted
        assert (engine.model.tp, engine.restarts) == (3, 1)


def test_weights_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose weights nobody holds cannot be compiled again; the requests say so."""
    monkeypatch.setattr(api, "captured_of", capture)  # a shared capture would hold the weights
    with made(lively("tiny-qwen3"), 1) as model, Engine(model, **OPTIONS) as engine:
        handle = engine.add(ASKED[0], PARAMS[0])
        engine.step()
        os.kill(model.processes[0], signal.SIGKILL)
        with pytest.raises(tpcompile.UnsupportedError, match="its weights are gone"):
            handle.result()
        assert "weights are gone" in engine.failure


def test_ranks_that_always_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few new starts, the requests end with the error."""
    eager = lively("tiny-qwen3")
    with made(eager, 1) as model, Engine(model, **OPTIONS) as engine:

        def die(runs: Runs, plan: object) -> None:
            raise tpcompile.RankError("rank 0 died again")

        monkeypatch.setattr(Runs, "run", die)
        handle = engine.add(ASKED[0], PARAMS[0])
        with pytest.raises(tpcompile.RankError, match="died again"):
            handle.result()
        assert engine.restarts == 3
        with pytest.raises(tpcompile.RankError, match=r"cannot go on: rank 0 died again"):
            engine.add(ASKED[0], PARAMS[0])


def test_a_tp_that_is_not_possible() -> None:
    """The requests end with the reason, also if a thread runs the engine."""
    eager = lively("tiny-qwen3")
    with made(eager, 1) as model, Engine(model, **OPTIONS).start() as engine:
        handle = engine.add(ASKED[0], greedy(100))
        engine.restart(tp=7)
        with pytest.raises(tpcompile.CompileError, match="tp=7"):
            handle.result()
        assert "tp=7" in engine.failure
