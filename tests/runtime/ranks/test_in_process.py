"""Ranks in this process take turns, and end between two steps."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

import tpcompile
from tests.runtime.ranks.left_behind import until
from tpcompile.errors import UsageError
from tpcompile.pause import paused_collector
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.ranks.in_process import InProcessRanks
from tpcompile.runtime.ranks.rank import Rank
from tpcompile.runtime.ranks.step import Step

pytestmark = pytest.mark.usefixtures("captured_once")

IDS = torch.tensor([[4, 5, 6]])
LIMIT_S = 60


@pytest.fixture
def model() -> CompiledModel:
    return tpcompile.compile("preset:tiny-qwen3", random_weights=0, backend="torch")


def test_closing_waits_for_the_step_that_runs(
    model: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a step uses is not freed."""
    begun, released, run = threading.Event(), threading.Event(), Rank.run

    def slow(rank: Rank, step: Step) -> torch.Tensor:
        begun.set()
        assert released.wait(LIMIT_S)
        return run(rank, step)

    monkeypatch.setattr(Rank, "run", slow)
    with ThreadPoolExecutor(2) as threads:
        outputs = threads.submit(model, IDS)
        assert begun.wait(LIMIT_S)
        closed = threads.submit(model.close)
        early = wait([closed], timeout=0.5).done
        released.set()
        assert outputs.result().logits.isfinite().all()
        closed.result()
    assert not early


def test_a_caller_that_waited_while_the_model_was_closed_is_refused(model: CompiledModel) -> None:
    ranks = model._ranks
    assert isinstance(ranks, InProcessRanks)
    ready = threading.Event()

    def call() -> None:
        ready.set()
        model(IDS)

    with ThreadPoolExecutor(1) as threads:
        with ranks._lock:
            called = threads.submit(call)
            assert ready.wait(LIMIT_S)
            until(lambda: called.done(), 0.5)
            model.close()
        with pytest.raises(UsageError, match="The model is closed"):
            called.result()


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("tp", [1, 2])
def test_closing_frees_weights_without_the_collector(tp: int, backend: str) -> None:
    """Until it ran, the next model would need as much memory again."""
    model = tpcompile.compile(
        "preset:tiny-qwen3", tp, random_weights=0, backend=backend, simulate=True
    )
    model.generate(IDS, max_new_tokens=2)
    modules = getattr(model._ranks, "_modules", model._ranks)  # programs have theirs inside
    weights = [weakref.ref(weight) for rank in modules._ranks for weight in rank._weights.values()]
    assert weights
    with paused_collector():
        model.close()
        assert all(weight() is None for weight in weights)
