"""Tests of the line of a request in the log, and of what is measured of it."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import pytest

from tests.serving.conftest import KEY, Log, Served, post
from tpcompile.serving import Engine
from tpcompile.serving.server.metrics import Metrics

SECRET = "Anna is a secret baker"


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_per_request(served: Served, log: Log, stream: bool) -> None:
    body = {"prompt": [SECRET, SECRET], "n": 2, "max_tokens": 3, "ignore_eos": True}
    answer = post(served, "completions", body | {"stream": stream})
    line = log.line()
    count = len(served.tokenizer(SECRET)["input_ids"])
    assert line["path"] == "/v1/completions" and line["status"] == "200"
    assert (line["prompt_tokens"], line["new_tokens"]) == (str(2 * count), "12")
    assert 0 < float(line["first_token_s"]) <= float(line["total_s"]) < 60
    assert line["id"] == answer.headers["x-request-id"] and f"cmpl-{line['id']}" in answer.text


def test_a_line_of_a_request_that_is_refused(served: Served, log: Log) -> None:
    answer = post(served, "completions", {"prompt": SECRET, "model": "other"})
    line = log.line()
    assert (line["status"], line["first_token_s"], line["new_tokens"]) == ("404", "-", "0")
    assert line["id"] == answer.headers["x-request-id"]


def test_a_line_of_a_stream_whose_client_goes_away(served: Served, log: Log) -> None:
    body = {"prompt": SECRET, "stream": True, "ignore_eos": True, "max_tokens": 110}
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", content=json.dumps(body), timeout=60,
        headers={"Authorization": f"Bearer {KEY}"},
    ) as answer:  # fmt: skip
        next(answer.iter_lines())
    line = log.line()
    assert line["status"] == "499" and 1 <= int(line["new_tokens"]) < 110


def measured(served: Served, name: str) -> float:
    text = httpx.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


def test_the_time_to_the_first_token_begins_with_the_request(served: Served) -> None:
    """Also for the last one of many prompts, and for each of their continuations."""
    name = "tpcompile_first_token_seconds"
    total, count = measured(served, f"{name}_sum"), measured(served, f"{name}_count")
    prompt = served.tokenizer(SECRET)["input_ids"] * 12
    body: dict[str, Any] = {"prompt": [prompt[n:] for n in range(6)], "n": 2, "max_tokens": 2}
    begun = time.perf_counter()
    post(served, "completions", body | {"ignore_eos": True})
    spent = time.perf_counter() - begun
    times = measured(served, f"{name}_sum") - total
    assert measured(served, f"{name}_count") - count == 12
    assert spent < times < 12 * spent


def test_restarts_and_failures_are_counted(served: Served) -> None:
    class Restarted(Engine):
        def __init__(self) -> None:
            vars(self).update(vars(served.engine), restarts=3)

    metrics = Metrics(Restarted())
    metrics.failures.labels("grammar").inc()
    text = metrics.text().decode()
    assert "# TYPE tpcompile_restarts_total counter\ntpcompile_restarts_total 3.0" in text
    assert 'tpcompile_failures_total{kind="grammar"} 1.0' in text
    assert "tpcompile_requests_waiting 0.0" in text and "tpcompile_blocks_used" in text
