"""Users of the server for Locust: prompts, streams, calls, structures, and clients that give up."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from locust import HttpUser, constant, events, task
from locust.env import Environment

NEW = 8
TEXT: dict[str, Any] = {"prompt": "the cat and the dog", "max_tokens": NEW, "temperature": 0}
COUNTED: dict[str, Any] = {**TEXT, "stream_options": {"include_usage": True}}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the cat and the dog"}],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": CITY}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "thinking_budget": 4,
}


@events.init_command_line_parser.add_listener
def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--key", default="", help="the API key")
    parser.add_argument("--requests", type=int, default=100, help="requests of all users together")


@events.init.add_listener
def _end(environment: Environment, **_: Any) -> None:
    """End the run after so many requests."""

    def answered(**_: Any) -> None:
        if environment.stats.total.num_requests >= environment.parsed_options.requests:
            environment.runner.quit()

    environment.events.request.add_listener(answered)


class Client(HttpUser):
    """A user who sends one request after the other."""

    wait_time = constant(0)

    def post(self, name: str, path: str = "completions", **body: Any) -> Any:
        """Send a request."""
        return self.client.post(
            f"/v1/{path}",
            name=name,
            json=body,
            headers={"Authorization": f"Bearer {self.environment.parsed_options.key}"},
            stream=body.get("stream", False),
            catch_response=True,
        )

    @task(3)
    def complete(self) -> None:
        with self.post("complete", **TEXT) as answer:
            if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != NEW:
                answer.failure(answer.text)

    @task(3)
    def stream(self) -> None:
        with self.post("stream", stream=True, **COUNTED) as answer:
            *parts, usage, end = (line for line in answer.iter_lines() if line)
            new_tokens = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
            if end != b"data: [DONE]" or new_tokens != NEW or not parts:
                answer.failure(repr(end))

    @task(1)
    def give_up(self) -> None:
        with self.post("give up", stream=True, **TEXT | {"max_tokens": 64}) as answer:
            if not next(answer.iter_lines(), b"").startswith(b"data: "):
                answer.failure("no first part")
            answer.close()

    @task(1)
    def call(self) -> None:
        with self.post("call", "chat/completions", **CALL) as answer:
            message = answer.json()["choices"][0]["message"]
            (call,) = message["tool_calls"]
            if json.loads(call["function"]["arguments"])["city"] not in ("Rome", "Oslo"):
                answer.failure(answer.text)

    @task(1)
    def choose(self) -> None:
        with self.post("choose", **TEXT, guided_choice=["cat", "dog"]) as answer:
            if answer.json()["choices"][0]["text"] not in ("cat", "dog"):
                answer.failure(answer.text)
