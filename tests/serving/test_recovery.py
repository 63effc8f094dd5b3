"""Requests survive the death of a rank, and a change of tp, with the tokens of a quiet run."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from functools import partial
from random import Random
from typing import Any

import pytest

import tpcompile
from tests.runtime.eager_pair import lively
from tests.serving.conftest import Log
from tests.serving.hybrids import remembering
from tests.serving.test_engine import greedy, prompt
from tpcompile import api
from tpcompile.frontend import capture
from tpcompile.serving import Engine
from tpcompile.serving.requests import Handle
from tpcompile.serving.runs import Runs

pytestmark = pytest.mark.usefixtures("forked_launchers")

STREAMS = 8
ASKED = [prompt(Random(n), 3 + 9 * n) for n in range(STREAMS)]
COMMON = prompt(Random(STREAMS), 70)
"""More than a chunk, so that requests with linear attention share a state."""
PARAMS = [greedy(24, **({"temperature": 0.9, "seed": n} if n % 2 else {})) for n in range(STREAMS)]
OPTIONS: dict[str, Any] = {"max_batch": 5, "chunk": 32, "max_tokens_per_step": 64}
WIDER: dict[str, Any] = {"max_batch": 5, "chunk": 64, "max_tokens_per_step": 96}
MODULES: dict[str, Any] = {"backend": "torch", "threads": 1}
"""More threads of torch would only wait for each other."""


def made(eager: Any, tp: int, **options: Any) -> tpcompile.CompiledModel:
    return tpcompile.compile(eager, tp, max_seq_len=192, isolate=True, **options)


def added(engine: Engine) -> list[Handle]:
    common = COMMON if engine.model.keeps_states else []
    prompts = [[*common, *tokens] for tokens in ASKED]
    return [engine.add(*request) for request in zip(prompts, PARAMS, strict=True)]


def results(handles: list[Handle]) -> list[list[int]]:
    return [handle.result()[0].tokens for handle in handles]


def streamed(engine: Engine) -> list[list[int]]:
    return results(added(engine))


def disturbed(engine: Engine, dice: Random) -> list[list[int]]:
    """Stream all requests, and kill a rank at some moment."""
    outputs: list[list[int]] = []
    running = threading.Thread(target=lambda: outputs.extend(streamed(engine)))
    running.start()
    time.sleep(dice.random() * 0.3)
    if running.is_alive():
        os.kill(dice.choice(engine.model.processes), signal.SIGKILL)
    running.join()
    return outputs


def killed(tp: int, kills: int, eager: Any, made_by: Any, options: dict[str, Any]) -> None:
    dice = Random(tp)
    with made_by(eager, tp) as model, Engine(model, **options) as engine:
        wanted = streamed(engine)
    engine = Engine(made_by(eager, tp), **options).start()
    try:
        died = 0
        while died < kills:
            before = engine.restarts
            assert disturbed(engine, dice) == wanted
            died += engine.restarts > before
        states = engine.scheduler.states
        assert states.available == states.count
    finally:
        engine.close()


def dense_killed(tp: int, kills: int) -> None:
    killed(tp, kills, lively("tiny-qwen3"), made, OPTIONS)


def hybrid_killed(tp: int, kills: int) -> None:
    """States are lost with the ranks, snapshots included."""
    killed(tp, kills, remembering(), partial(made, **MODULES), WIDER)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("run", [dense_killed, hybrid_killed])
def test_a_rank_is_killed(run: Any, tp: int) -> None:
    run(tp, 2)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("run", [dense_killed, hybrid_killed])
def test_ranks_are_killed_a_hundred_times(run: Any, tp: int) -> None:
    run(tp, 50)


def another_tp(eager: Any, options: dict[str, Any], **compiled: Any) -> None:
    with made(eager, 1, **compiled) as model, Engine(model, **options) as engine:
        wanted = streamed(engine)
        handles = added(engine)
        for _ in range(9):
            engine.step()
        engine.restart(tp=3)
        assert results(handles) == wanted
        assert (engine.model.tp, engine.restarts) == (3, 1)


def test_another_tp_while_requests_run() -> None:
    another_tp(lively("tiny-qwen3"), OPTIONS)


def test_another_tp_with_linear_attention() -> None:
    another_tp(remembering(), WIDER, **MODULES)


def test_weights_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose weights nobody holds cannot be compiled again; the requests say so."""
    monkeypatch.setattr(api, "captured_of", capture)  # a shared capture would hold the weights
    with made(lively("tiny-qwen3"), 1) as model, Engine(model, **OPTIONS) as engine:
        handle = engine.add(ASKED[0], PARAMS[0])
        engine.step()
        gc.collect()  # modules are in cycles
        os.kill(model.processes[0], signal.SIGKILL)
        with pytest.raises(tpcompile.UnsupportedError, match="its weights are gone"):
            handle.result()
        assert "weights are gone" in engine.failure


def test_ranks_that_always_die(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """After a few new starts, the requests end with the error. The log has each of them."""
    eager = lively("tiny-qwen3")
    with made(eager, 1) as model, Engine(model, **OPTIONS) as engine:

        def die(runs: Runs, plan: object) -> None:
            raise tpcompile.RankError("rank 0 died again")

        monkeypatch.setattr(Runs, "run", die)
        handle = engine.add(ASKED[0], PARAMS[0])
        with pytest.raises(tpcompile.RankError, match="died again"):
            handle.result()
        assert engine.restarts == 3
        starts = [text for text in log.texts if text.startswith("the ranks are started again")]
        assert starts == [f"the ranks are started again ({n})" for n in (1, 2, 3)]
        assert log.texts[-1] == "the engine cannot go on: rank 0 died again."
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
