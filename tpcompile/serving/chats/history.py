"""The messages of a chat, as chat templates take them."""

from __future__ import annotations

import json
from typing import Any

from tpcompile.errors import UsageError


def history_of(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a body; parts of text are joined.

    The arguments of calls become objects, since the templates of Qwen models expect objects.
    """
    if not isinstance(value, list) or not value:
        raise UsageError("messages must be a list that is not empty")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise UsageError(f"{where} must have a role and a content")
    message = {"role": value["role"], "content": _content(value.get("content"))}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (text := value.get(name)) is not None:
            if not isinstance(text, str):
                raise UsageError(f"{where}.{name} must be a text")
            message[name] = text
    if calls := value.get("tool_calls"):
        if value["role"] != "assistant" or not isinstance(calls, list):
            raise UsageError(f"{where}.tool_calls must be a list, in a message of the assistant")
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)
        ]
    if message["content"] is None:
        omitted = value["role"] == "assistant" and value.get("content") is None
        if not omitted or not ("tool_calls" in message or "reasoning_content" in message):
            raise UsageError(f"{where}.content must be a text, or a list of parts that are text")
        message["content"] = ""
    return message


def _content(value: Any) -> str | None:
    """Return a text, or the joined text of parts; None for anything else."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in value]
        texts = [text for text in parts if isinstance(text, str)]
        return "".join(texts) if len(texts) == len(parts) else None
    return value if isinstance(value, str) else None


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where} must have a function with a name and arguments")
    if not isinstance(value.get("id") or "", str):
        raise UsageError(f"{where}.id must be a text")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    function = {"name": function["name"], "arguments": arguments}
    return {"id": value.get("id") or "", "type": "function", "function": function}


def _arguments(value: Any, where: str) -> dict[str, Any]:
    """Return arguments as an object, which is empty if there are none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
            json.dumps(value, ensure_ascii=False).encode()  # not half of a surrogate pair
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} must be JSON, in UTF-8") from error
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a JSON object")
    return value
