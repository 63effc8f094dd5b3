"""Two replicas on a local Ray cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import tpcompile
from tpcompile.errors import UsageError
from tpcompile.serving import Engine, SamplingParams

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

from ray import serve  # noqa: E402

from tpcompile.replicas import app  # noqa: E402

MODEL = "preset:tiny-qwen3"
BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 5, "logprobs": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(
            app(MODEL, random_weights=3, max_seq_len=128, replicas=2, tp=2, name="tiny", cpus=1)
        )
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def test_answers_are_those_of_an_engine(url: str) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=1, seed=4)
    with (
        tpcompile.compile(MODEL, random_weights=3, max_seq_len=128) as model,
        Engine(model) as engine,
    ):
        wanted = engine.add(BODY["prompt"], params).result()[0].tokens
    answer = httpx.post(f"{url}/v1/completions", json=BODY | {"seed": 4}, timeout=60).json()
    found = answer["choices"][0]["logprobs"]["tokens"]
    assert [int(token.removeprefix("token_id:")) for token in found] == wanted
    assert answer["model"] == "tiny"
    assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"}


def test_streams_and_errors(url: str) -> None:
    body = BODY | {"stream": True, "max_tokens": 9}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert [json.loads(line)["choices"][0]["finish_reason"] for line in lines[:-1]][-1] == "length"
    assert len(lines) == 9 + 1
    bad = httpx.post(f"{url}/v1/completions", json={"prompt": []}, timeout=60)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "prompt")


def replica_processes() -> list[int]:
    """Return the processes of the replicas; Ray names them so."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if re.match(rb"ray::ServeReplica:[^:]*:Replica\b", title):
            found.append(int(process.name))
    return found


def test_requests_survive_the_death_of_a_replica(url: str) -> None:
    """Those that have not begun go to another replica, and Ray starts a new one."""

    def ask(seed: int) -> int:
        body = BODY | {"seed": seed, "max_tokens": 40}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code

    before = replica_processes()
    assert len(before) == 2
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(ask, range(60))
        time.sleep(0.3)
        os.kill(before[0], signal.SIGKILL)
        assert set(answers) == {200}
    end = time.monotonic() + 120
    while len(replica_processes()) < 2 or before[0] in replica_processes():
        assert time.monotonic() < end
        time.sleep(0.1)
    assert ask(1) == 200


@pytest.fixture(scope="module")
def growing(url: str) -> Iterator[str]:
    """An application that starts with one replica."""
    grown = app(
        MODEL, random_weights=3, max_seq_len=4096, replicas=(1, 2), max_batch=1, name="tiny", cpus=1
    )
    serve.run(grown, name="growing", route_prefix="/growing")
    yield f"{url}/growing"
    serve.delete("growing")


def test_a_client_that_goes_away_ends_its_request(growing: str) -> None:
    def running() -> float:
        text = httpx.get(f"{growing}/metrics", timeout=60).text
        found = re.search(r"^tpcompile_requests_running (\S+)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    body = BODY | {"stream": True, "max_tokens": 4000}
    with httpx.stream("POST", f"{growing}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert running() == 1
    begun = time.monotonic()
    while running():
        assert time.monotonic() < begun + 60
    last = httpx.get(f"{growing}/metrics", timeout=60).text
    made = re.search(r"^tpcompile_new_tokens_total (\S+)$", last, re.MULTILINE)
    assert made is not None and float(made[1]) < 4000


def test_a_replica_is_added_when_requests_queue(growing: str) -> None:
    before = len(replica_processes())
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            body = BODY | {"max_tokens": 500}
            answer = httpx.post(f"{growing}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            end = time.monotonic() + 180
            while len(replica_processes()) < before + 1:
                assert time.monotonic() < end
                time.sleep(0.2)
        finally:
            over.set()
    for one in asking:
        one.result()


def test_a_number_of_replicas_that_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="replicas must be a positive int"):
        app(MODEL, replicas=(3, 2))
