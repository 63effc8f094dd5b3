"""Clients that are slow, many, gone or hostile do not harm the server."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.conftest import KEY, Served
from tests.serving.mixes import fuzzed_body
from tests.serving.test_server import PROMPT, eager_text, measured, post

HEADERS = {"Authorization": f"Bearer {KEY}"}
CONNECTIONS = 500


def connected(served: Served, body: Any) -> socket.socket:
    """Send a request over a connection of its own, and leave the answer unread."""
    host, port = served.url.removeprefix("http://").split(":")
    text = json.dumps(body)
    line = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
    line.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
    return line


def until(holds: Any, seconds: float = 60) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def idle(served: Served) -> bool:
    blocks = served.engine.scheduler.blocks
    return blocks.available == blocks.count


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(
    served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are free after the step in which it went away, and at most one more."""
    until(lambda: idle(served))
    run = served.engine.model.run_step
    monkeypatch.setattr(
        served.engine.model, "run_step", lambda step: (time.sleep(0.1), run(step))[1]
    )
    body = {"prompt": PROMPT, "max_tokens": 100, "stream": stream, "ignore_eos": True}
    with connected(served, body):
        until(lambda: not idle(served))
    steps = served.engine.steps
    until(lambda: idle(served))
    assert served.engine.steps <= steps + 2


def test_a_slow_reader(served: Served) -> None:
    """A client that never reads its stream delays nobody, and its blocks are freed."""
    until(lambda: idle(served))
    body = {"prompt": PROMPT, "max_tokens": 100, "stream": True, "ignore_eos": True, "logprobs": 20}
    with connected(served, body):
        until(lambda: not idle(served))
        answer = post(served, "completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0})
        assert answer.json()["choices"][0]["text"].strip()
        until(lambda: idle(served))


def test_many_connections_at_once(served: Served) -> None:
    async def ask(http: httpx.AsyncClient) -> str:
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = await http.post(f"{served.url}/v1/completions", json=body)
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def all_of() -> set[str]:
        limits = httpx.Limits(max_connections=CONNECTIONS)
        async with httpx.AsyncClient(headers=HEADERS, timeout=120, limits=limits) as http:
            return set(await asyncio.gather(*(ask(http) for _ in range(CONNECTIONS))))

    assert asyncio.run(all_of()) == {eager_text(served, PROMPT, 2)}


def test_a_body_of_a_hundred_megabytes(served: Served) -> None:
    """It is refused before it is read to the end, and the client sees why."""
    answer = post(served, "completions", b" " * (100 << 20))
    assert answer.status_code == 413
    assert "at most 16,777,216 bytes" in answer.json()["error"]["message"]


def test_a_prompt_of_a_million_tokens(served: Served) -> None:
    answer = post(served, "completions", {"prompt": [1] * 10**6, "max_tokens": 1})
    assert answer.status_code == 400
    assert "Found 1,000,000 tokens" in answer.json()["error"]["message"]


def fuzzed(served: Served, count: int) -> None:
    """Send bodies that are changed at random. Each gets an answer, and the server lives."""
    dice = random.Random(count)
    with httpx.Client(headers=HEADERS, timeout=60) as http:
        for _ in range(count):
            path, body = fuzzed_body(dice)
            answer = http.post(f"{served.url}/v1/{path}", content=body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            assert not re.search(r'"code": 5..', answer.text), (body, answer.text)
    assert httpx.get(f"{served.url}/health").status_code == 200
    until(lambda: idle(served))


def test_fuzzed_bodies(served: Served) -> None:
    fuzzed(served, 200)


def test_fuzzed_bodies_for_an_assistant(server: Served) -> None:
    """Its template has tools and thinking, so these fields take effect."""
    fuzzed(server, 200)


@pytest.mark.slow
def test_two_thousand_fuzzed_bodies(served: Served, server: Served) -> None:
    for target in (served, server):
        fuzzed(target, 2000)


def resident() -> int:
    """Return the memory of this process, which runs the server, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
def test_memory_stays_flat(served: Served) -> None:
    """After 10,000 requests, the server has no more memory than after the first 2,000."""
    dice = random.Random(1)

    def ask(http: httpx.Client, count: int) -> int:
        for _ in range(count):
            words = " ".join(dice.choice(["Anna", "Felix", "is", "a", "baker"]) for _ in range(30))
            body = {"prompt": words, "max_tokens": 2, "stream": dice.random() < 0.5}
            assert http.post(f"{served.url}/v1/completions", json=body).status_code == 200
        return resident()

    with httpx.Client(headers=HEADERS, timeout=60) as http:
        before = ask(http, 2000)
        after = ask(http, 8000)
    assert after - before < 8 << 20


def test_no_text_of_a_request_is_in_metrics(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither is it in the output of the server, also if the request fails."""
    for body in ({"prompt": "SECRET", "max_tokens": 1}, {"prompt": "SECRET", "n": -1}, ["SECRET"]):
        post(served, "completions", body)
    post(served, "SECRET", {})
    output = "".join(capfd.readouterr())
    assert "SECRET" not in output + measured(served)
