"""The tools of a request, and whether its answer may or must call them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tpcompile.errors import UsageError
from tpcompile.serving.chats.calls import Tools

AUTO, NONE, REQUIRED = CHOICES = ("auto", "none", "required")
_NAME = re.compile(r"[^\s\"'<>\\\x00-\x1f]{1,128}")


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request."""

    listed: tuple[dict[str, Any], ...]
    """The tools as the request lists them, for the chat template."""
    choice: str = AUTO
    """The mode of calls, a member of `CHOICES`."""
    name: str | None = None
    """The only function that may be called."""
    parallel: bool = True
    """Whether an answer may have several calls."""

    @property
    def functions(self) -> Tools:
        """The functions that may be called."""
        functions = [tool["function"] for tool in self.listed]
        return [function for function in functions if self.name in (None, function["name"])]


def tool_use_of(tools: Any, choice: Any, parallel: bool) -> ToolUse | None:
    """Return the use of tools that the fields of a body request; None without tools."""
    listed = _listed(tools)
    name = None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise UsageError('tool_choice must be {"type": "function", "function": {"name": NAME}}')
        if name not in {tool["function"]["name"] for tool in listed}:
            raise UsageError(f"tool_choice must name one of tools, got {name[:60]!r}")
        choice = REQUIRED
    elif choice not in CHOICES:
        expected = ", ".join(CHOICES)
        raise UsageError(f"tool_choice must be {expected}, or name a function")
    if choice == REQUIRED and not listed:
        raise UsageError("tool_choice needs tools, got none")
    return ToolUse(listed, choice, name, parallel) if listed else None


def _listed(tools: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(tools, list):
        raise UsageError("tools must be a list")
    names = set()
    for place, tool in enumerate(tools):
        name = _checked(tool, f"tools[{place}]")
        if name in names:
            raise UsageError(f"tools must have different names, got {name!r} twice")
        names.add(name)
    return tuple(tools)


def _checked(tool: Any, where: str) -> str:
    """Return the name of a tool; raise if it is not a function with a schema of its parameters."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise UsageError(f'{where} must be {{"type": "function", "function": {{…}}}}')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{where}.function.name must be a text of 1 to 128 characters, without spaces, quotes, "
            "angle brackets and backslashes"
        )
    if not isinstance(function.get("description") or "", str):
        raise UsageError(f"{where}.function.description must be a text")
    parameters = function.get("parameters")
    if parameters is not None and not _is_schema(parameters):
        raise UsageError(f"{where}.function.parameters must be a JSON schema of an object")
    return name


def _is_schema(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        return False
    properties, required = value.get("properties", {}), value.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return all(isinstance(schema, dict | bool) for schema in properties.values())
