"""Tools of the demo model as a client offers them, and what its calls must be."""

from __future__ import annotations

import json
import re
from typing import Any

DESCRIPTIONS = {
    "get_weather": ("Get the current weather in a city.", {"city": "The name of the city"}),
    "get_time": ("Get the local time of a city.", {"city": "The name of the city"}),
    "add": ("Add two integers.", {"a": "The first number", "b": "The second number"}),
}
_TYPES = {"city": "string", "a": "integer", "b": "integer"}
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def offered(*names: str) -> list[dict[str, Any]]:
    """Return tools as the openai client sends them."""
    return [_function(name) for name in names or DESCRIPTIONS]


def _function(name: str) -> dict[str, Any]:
    said, parameters = DESCRIPTIONS[name]
    properties = {
        key: {"type": _TYPES[key], "description": text} for key, text in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    return {
        "type": "function",
        "function": {"name": name, "description": said, "parameters": schema},
    }


def calls_in(text: str) -> list[dict[str, Any]]:
    """Return the calls of an answer."""
    return [json.loads(call) for call in _CALL.findall(text)]
