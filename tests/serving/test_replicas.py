"""Replicas on a local Ray cluster: one, and a second one when requests queue."""

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
from transformers import AutoConfig

import tpcompile
from tpcompile.errors import UsageError
from tpcompile.presets import preset
from tpcompile.serving import Engine, SamplingParams

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

from ray import serve  # noqa: E402

from tpcompile.replicas import app  # noqa: E402

# Ray 2.50 closes neither its files nor its processes.
pytestmark = [
    pytest.mark.filterwarnings(
        f"ignore:Exception ignored in. <{source}:pytest.PytestUnraisableExceptionWarning"
    )
    for source in (r"_io.FileIO name='/dev/null'", r"function Popen.__del__")
]

LIMIT_S = 240
"""Far more than an answer takes, since replicas start slowly on a busy machine."""
BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 5, "logprobs": 0, "ignore_eos": True}


def replica_processes() -> list[int]:
    """Return the processes of this cluster's replicas, by the names that Ray gives them."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes()
        except OSError:
            continue
        pid = int(process.name)
        if re.match(rb"ray::ServeReplica:[^:]*:Replica\b", title) and os.getpid() in parents(pid):
            pids.append(pid)
    return pids


def parents(process: int) -> Iterator[int]:
    """Yield the processes that started a process, from its parent on."""
    while process > 1:
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return
        process = int(stat.rpartition(")")[2].split()[1])
        yield process


def start(port: int, tries: int = 5) -> None:
    """Start Ray and Serve, again if they gave up: on a busy machine, 30 s and 5 s are too short.

    Workers have the priority of other tests. With Ray's own niceness of 15, they wait for minutes.
    """
    for left in range(tries - 1, -1, -1):
        try:
            ray.init(
                num_cpus=6,
                include_dashboard=False,
                log_to_driver=False,
                _system_config={"worker_niceness": 0},
            )
            serve.start(http_options={"host": "127.0.0.1", "port": port})
        except Exception as error:  # Ray has no class of its own for nodes that start too slowly
            slow = isinstance(error, ray.exceptions.RayActorError) or "timed out" in str(error)
            if not (slow and left):
                raise
            stop()
        else:
            return


def stop() -> None:
    """Stop Serve and Ray, as far as they have started."""
    if ray.is_initialized():
        serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model whose positions allow requests that run for seconds."""
    path = tmp_path_factory.mktemp("model")
    config = {**preset("tiny-qwen3"), "max_position_embeddings": 4096}
    AutoConfig.for_model(**config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def url(model_path: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        start(port)
        options = {"random_weights": 3, "tp": 2, "cpus": 1}
        serve.run(app(model_path, replicas=(1, 2), max_batch=1, name="tiny", **options))
        yield f"http://127.0.0.1:{port}"
    finally:
        stop()


def test_answers_are_those_of_an_engine(url: str, model_path: str) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=1, seed=4)
    with (
        tpcompile.compile(model_path, random_weights=3, max_seq_len=128) as model,
        Engine(model) as engine,
    ):
        wanted = engine.add(BODY["prompt"], params).result()[0].tokens
    answer = httpx.post(f"{url}/v1/completions", json=BODY | {"seed": 4}, timeout=LIMIT_S).json()
    tokens = answer["choices"][0]["logprobs"]["tokens"]
    assert [int(token.removeprefix("token_id:")) for token in tokens] == wanted
    assert answer["model"] == "tiny"
    assert httpx.get(f"{url}/health", timeout=LIMIT_S).json() == {"status": "ok"}


def test_streams_and_errors(url: str) -> None:
    body = BODY | {"stream": True, "max_tokens": 9}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert [json.loads(line)["choices"][0]["finish_reason"] for line in lines[:-1]][-1] == "length"
    assert len(lines) == 9 + 1
    bad = httpx.post(f"{url}/v1/completions", json={"prompt": []}, timeout=LIMIT_S)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "prompt")


def test_a_client_that_goes_away_ends_its_request(url: str) -> None:
    def measured(name: str) -> float:
        text = httpx.get(f"{url}/metrics", timeout=LIMIT_S).text
        line = re.search(rf"^tpcompile_{name} (\S+)$", text, re.MULTILINE)
        assert line is not None
        return float(line[1])

    before = measured("new_tokens_total")
    body = BODY | {"stream": True, "max_tokens": 4000}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()  # it would close the stream when it is deleted
        next(lines)
        assert measured("requests_running") == 1
    end = time.monotonic() + LIMIT_S
    while measured("requests_running"):
        assert time.monotonic() < end
    assert measured("new_tokens_total") < before + 4000


@pytest.fixture(scope="module")
def two(url: str) -> str:
    """The address when requests have queued until there are two replicas."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            body = BODY | {"max_tokens": 500}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
            assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            end = time.monotonic() + LIMIT_S
            while len(replica_processes()) < 2:
                assert time.monotonic() < end
                time.sleep(0.2)
        finally:
            over.set()
    for future in asking:
        future.result()
    return url


def test_requests_survive_the_death_of_a_replica(two: str) -> None:
    """Those that have not begun go to another replica, and Ray starts a new one."""

    def ask(seed: int) -> int:
        body = BODY | {"seed": seed, "max_tokens": 40}
        return httpx.post(f"{two}/v1/completions", json=body, timeout=LIMIT_S).status_code

    before = replica_processes()
    assert len(before) == 2
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(ask, range(60))
        time.sleep(0.3)
        os.kill(before[0], signal.SIGKILL)
        assert set(answers) == {200}
    end = time.monotonic() + LIMIT_S
    while len(replica_processes()) < 2 or before[0] in replica_processes():
        assert time.monotonic() < end
        time.sleep(0.1)
    assert ask(1) == 200


def test_a_number_of_replicas_that_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="replicas must be a positive int"):
        app("preset:tiny-qwen3", replicas=(3, 2))
