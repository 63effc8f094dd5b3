"""Everything at once: mixes of all fields, guesses, an adapter, faults and clients that leave."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

import tpcompile
from benchmarks.speculation_bits import take_equal_times
from tests.adapters import adapter
from tests.serving.clients.conftest import assistant
from tests.serving.conftest import serve
from tests.serving.mixes import MODELS, choices_of, fuzzed_body, random_chat
from tests.serving.test_sound import until
from tpcompile.serving import Engine
from tpcompile.serving.server.options import Options

pytestmark = pytest.mark.usefixtures("forked_launchers")

CLIENTS = 16
TIMEOUT_S = 240
LOGPROB = 1e-4
"""A new start of the ranks computes tokens again, which changes the last bits."""


class Storm:
    """Clients of a server, and what happens to it."""

    def __init__(self, engine: Engine, url: str) -> None:
        self._engine, self._url = engine, url
        self._kills = threading.Lock()
        self._accepted = 0
        """The guesses that were right, before the last new start of the ranks."""

    @property
    def accepted(self) -> int:
        """The guesses that were right."""
        return self._accepted + self._engine.model.steps.accepted

    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self._post("chat/completions", json=body)
        assert answer.status_code == 200, (body, answer.text)
        return choices_of(answer.text, body)

    def compare(self, body: dict[str, Any], alone: list[dict[str, Any]]) -> None:
        """Check that an answer is the one that the request gets alone."""
        close = [
            choice | {"logprobs": pytest.approx(choice["logprobs"], abs=LOGPROB)}
            for choice in alone
        ]
        assert self.answer(body) == close, body

    def leave(self, body: dict[str, Any], events: int) -> None:
        """Read the beginning of a stream, and go away."""
        url = f"{self._url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=TIMEOUT_S) as answer:
            lines = answer.iter_lines()
            for _ in range(events):
                next(lines, "")

    def fuzz(self, path: str, body: bytes) -> None:
        answer = self._post(path, content=body)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        assert not re.search(r'"code": 5\d\d', answer.text), (body, answer.text)

    def kill(self, dice: Random) -> None:
        """Kill a rank, and wait until all of them are started again."""
        with self._kills:
            before, self._accepted = self._engine.restarts, self.accepted
            os.kill(dice.choice(self._engine.model.processes), signal.SIGKILL)
            until(lambda: self._engine.restarts > before, TIMEOUT_S)

    def _post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self._url}/v1/{path}", timeout=TIMEOUT_S, **body)


@contextmanager
def serving(base: Path, change: Path, tokenizer: Any, **options: Any) -> Iterator[Any]:
    name, *aliases = MODELS
    with (
        tpcompile.compile(str(base), tp=2, adapter=str(change)) as model,
        Engine(model, tokenizer=tokenizer, max_batch=8, **options).start() as engine,
    ):
        server, thread, url = serve(engine, Options(name, aliases=tuple(aliases)))
        try:
            yield engine, url
        finally:
            server.should_exit = True
            thread.join()


def storm(directory: Path, arch: str, requests: int, fuzzed: int, kills: int) -> None:
    """Send requests, a third of which nobody waits for, and changed ones, and kill ranks."""
    eager, tokenizer = assistant(directory / "demo", arch)
    base = directory / "base"
    eager.save_pretrained(base)
    change = adapter(base, directory / "adapter", r=4, target_modules="all-linear")
    dice = Random(requests)
    bodies = [random_chat(dice) | {"stream": dice.random() < 0.5} for _ in range(requests)]
    with serving(base, change, tokenizer) as (engine, url):
        alone = [Storm(engine, url).answer(body) for body in bodies]
    with serving(base, change, tokenizer, speculate="prompt:6") as (engine, url):
        take_equal_times(engine)
        clients = Storm(engine, url)
        jobs: list[Callable[[], Any]] = [
            partial(clients.compare, body, choices)
            for body, choices in zip(bodies, alone, strict=True)
        ]
        jobs += [
            partial(clients.leave, body, dice.randrange(9)) for body in bodies[: requests // 2]
        ]
        jobs += [partial(clients.fuzz, *fuzzed_body(dice)) for _ in range(fuzzed)]
        dice.shuffle(jobs)
        for number in range(kills):
            jobs.insert((number + 1) * len(jobs) // (kills + 1), partial(clients.kill, dice))
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(job) for job in jobs]:
                done.result()
        check_nothing_is_left(engine, url, kills)
        assert clients.accepted > 0


def check_nothing_is_left(engine: Engine, url: str, kills: int) -> None:
    scheduler = engine.scheduler
    until(lambda: not (scheduler.running or scheduler.waiting))
    assert scheduler.blocks.held == 0
    assert scheduler.states.available == scheduler.states.count
    assert httpx.get(f"{url}/health").status_code == 200
    assert f"tpcompile_restarts_total {kills}.0" in httpx.get(f"{url}/metrics").text


def test_everything_at_once(tmp_path: Path) -> None:
    storm(tmp_path, "qwen3", requests=12, fuzzed=30, kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("requests", [50, 51, 52, 53])
def test_long_storms(tmp_path: Path, arch: str, requests: int) -> None:
    storm(tmp_path, arch, requests, fuzzed=350, kills=2)
