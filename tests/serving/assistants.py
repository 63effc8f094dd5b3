"""Requests for assistants, and their messages, whole and joined from a stream."""

from __future__ import annotations

from typing import Any

from tests.serving.conftest import Served, post

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("weather", "time")
]
USER: Any = [{"role": "user", "content": "Anna"}]
BODY: dict[str, Any] = {"model": "demo", "messages": USER, "max_tokens": 256}
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln </tool_call>", "days": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nHm, 🐈.\n</think>\n\n"


def whole(server: Served, body: dict[str, Any]) -> Any:
    answer = post(server, "chat/completions", BODY | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(chat: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Return the message that the pieces of a stream join to, and why it ends."""
    known = {"tools", "tool_choice", "parallel_tool_calls", "stop", "n", "seed", "temperature"}
    options = {name: value for name, value in (BODY | body).items() if name in {*BODY, *known}}
    extra = {name: value for name, value in body.items() if name not in options}
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "calls": []}
    for chunk in chat.create(stream=True, extra_body=extra, **options):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for piece in choice.delta.tool_calls or ():
            if piece.id:
                assert (piece.index, piece.type) == (len(message["calls"]), "function")
                message["calls"].append([piece.id, piece.function.name, ""])
            message["calls"][piece.index][2] += piece.function.arguments or ""
        message["finish"] = choice.finish_reason
    return message
