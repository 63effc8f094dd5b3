"""The program curl: whole answers, streams and errors."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.serving.clients.conftest import Address
from tests.serving.clients.weather import QUESTION, Weather, weather_tool

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 20,
    "temperature": 0,
}
CALL = BODY | {
    "tools": [weather_tool()],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": False,
    "max_tokens": 120,
}

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def curl(server: Address, body: Any, *options: str) -> str:
    """Post a body as text to the server; return what curl prints."""
    ran = subprocess.run(
        [
            *("curl", "--silent", "--show-error", "--max-time", "60", *options),
            *("-H", f"Authorization: Bearer {server.key}", "-d", "@-"),
            f"{server.url}/chat/completions",
        ],
        input=json.dumps(body),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert not ran.stderr
    return ran.stdout


def events(text: str) -> list[Any]:
    """Return the pieces of a stream."""
    *lines, last = text.strip().split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_whole_and_streamed(server: Address) -> None:
    """The type of the body is that of forms, as curl sends it if nothing else is said."""
    content = json.loads(curl(server, BODY))["choices"][0]["message"]["content"]
    pieces = events(curl(server, BODY | {"stream": True}, "--no-buffer"))
    assert content
    assert content == "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)


def test_a_call(server: Address) -> None:
    (call,) = json.loads(curl(server, CALL))["choices"][0]["message"]["tool_calls"]
    arguments = call["function"]["arguments"]
    assert Weather.model_validate_json(arguments)
    pieces = events(curl(server, CALL | {"stream": True}, "--no-buffer"))
    calls = [
        call for piece in pieces for call in piece["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert calls[0]["function"]["name"] == "weather"
    assert "".join(call["function"].get("arguments", "") for call in calls) == arguments


def test_an_error(server: Address) -> None:
    written = ("--write-out", "\n%{http_code}")
    text, status = curl(server, BODY | {"colour": 1}, *written).rsplit("\n", 1)
    assert (status, json.loads(text)["error"]["param"]) == ("400", "colour")
