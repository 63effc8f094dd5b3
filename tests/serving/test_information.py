"""Tests of the routes that say what a server is, and of paths that are not there."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serving.conftest import KEY, Served, post, post_to
from tpcompile import __version__
from tpcompile.serving.server.options import Options


def get(served: Served, path: str, key: str = KEY) -> httpx.Response:
    return httpx.get(f"{served.url}{path}", headers={"Authorization": f"Bearer {key}"})


def test_a_model_by_its_name(served: Served) -> None:
    (listed,) = get(served, "/v1/models").json()["data"]
    assert listed == get(served, "/v1/models/demo").json()
    assert (listed["id"], listed["max_model_len"]) == ("demo", 128)
    answer = get(served, "/v1/models/Qwen/Qwen3-0.6B")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "There is no model 'Qwen/Qwen3-0.6B'; the server has demo" in error["message"]
    for path in ("/v1/models/demo", "/version"):
        assert get(served, path, "another").status_code == 401


def test_the_version(served: Served) -> None:
    assert get(served, "/version").json() == {"version": __version__}


BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Anna is", "max_tokens": 1},
    "chat/completions": {"messages": [{"role": "user", "content": "Anna"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", BODIES)
def test_bodies_name_the_model(served: Served, path: str) -> None:
    body = BODIES[path]
    for name, status in (("demo", 200), (None, 200), ("gpt-4o", 404), ("", 404)):
        answer = post(served, path, body | {"model": name})
        assert answer.status_code == status, answer.text
        if status == 404:
            assert answer.json()["error"]["code"] == "model_not_found"


def test_several_names(served: Served) -> None:
    """Requests may use any of them; answers have the first one."""
    options = Options("demo", aliases=("gpt-4o",))
    for name, status in (("demo", 200), ("gpt-4o", 200), ("other", 404)):
        body = BODIES["completions"] | {"model": name}
        answer = post_to(served.engine, options, "/v1/completions", body)
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["model"] == "demo"


def test_a_path_that_is_not_there_lists_those_that_are(served: Served) -> None:
    for method, path, status in (("GET", "/v1/engines", 404), ("GET", "/v1/completions", 405)):
        answer = httpx.request(method, f"{served.url}{path}")
        message = answer.json()["error"]["message"]
        assert answer.status_code == status
        assert message.startswith(f"There is no {method} {path}; there is GET /, GET /health, ")
        assert "POST /v1/chat/completions" in message and "GET /v1/models/{model:path}" in message
