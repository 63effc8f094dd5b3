"""An interpreter exits cleanly while a daemon thread still generates."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tpcompile.runtime.open_calls import OpenCalls

ROOT = Path(__file__).parents[2]

_SCRIPT = """
import sys, threading
sys.path.insert(0, {root!r})
import torch, tpcompile

models = [
    tpcompile.compile("preset:tiny-qwen3", random_weights=0, **how) for how in {how}
]
begun = [threading.Event() for _ in models]

class Streamer:
    def __init__(self, event):
        self.event = event
    def put(self, tokens):
        self.event.set()
    def end(self):
        pass

def work(model, event):
    ids = torch.tensor([[4, 5, 6]])
    while True:
        model.generate(ids, max_new_tokens=100, pad_token_id=3, streamer=Streamer(event))

for model, event in zip(models, begun):
    threading.Thread(target=work, args=(model, event), daemon=True).start()
assert all(event.wait(120) for event in begun)
print(*models[1].processes)
"""

HOW = [
    [{"tp": 1}, {"tp": 2}],
    pytest.param([{"tp": 1}, {"tp": 2, "simulate": True}], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("how", HOW, ids=["workers", "simulated"])
def test_daemon_threads_that_generate(tmp_path: Path, how: list[dict[str, object]]) -> None:
    """Exiting causes no crash in torch and no traceback, and leaves no process."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(root=str(ROOT), how=how))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    for process in map(int, done.stdout.split()):
        assert not Path(f"/proc/{process}").exists()


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record exceptions that end threads; Python's own hook is silent for SystemExit."""
    exceptions: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: exceptions.append(told.exc_type))
    return exceptions


def _in_thread(calls: OpenCalls, inside: threading.Event, go: threading.Event) -> threading.Thread:
    def work() -> None:
        with calls.enter():
            inside.set()
            go.wait(60)
            raise ValueError("the ranks are gone")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_the_end_waits_for_a_call_that_has_begun(raised: list[object]) -> None:
    """Exit waits for a running call; errors caused by exiting end the thread silently."""
    calls, inside, go = OpenCalls(), threading.Event(), threading.Event()
    thread = _in_thread(calls, inside, go)
    assert inside.wait(60)
    ending = threading.Thread(target=calls.end)
    ending.start()
    ending.join(0.05)
    assert ending.is_alive()
    go.set()
    ending.join(60)
    thread.join(60)
    assert not ending.is_alive() and not thread.is_alive()
    assert raised == [SystemExit]


def test_the_end_waits_until_a_thread_has_freed_what_it_holds(raised: list[object]) -> None:
    """Exit waits until the thread has freed its tensors, which needs the interpreter's lock."""
    calls, inside, ends = OpenCalls(), threading.Event(), threading.Event()

    def work() -> None:
        try:
            with calls.enter():
                inside.set()
                ends.wait(60)
                raise ValueError("the ranks are gone")
        finally:
            time.sleep(0.2)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert inside.wait(60)
    threading.Timer(0.05, ends.set).start()
    calls.end()
    assert not thread.is_alive() and raised == [SystemExit]


def test_after_the_end_only_the_main_thread_calls(raised: list[object]) -> None:
    calls, inside, go = OpenCalls(), threading.Event(), threading.Event()
    calls.end()
    go.set()
    _in_thread(calls, inside, go).join(60)
    assert not inside.is_set() and raised == [SystemExit]
    with calls.enter(), calls.enter():
        pass
    with pytest.raises(KeyError), calls.enter():
        raise KeyError("as ever")
