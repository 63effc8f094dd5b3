"""The tools of a request: which may be called, and which bodies are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tpcompile.errors import UsageError
from tpcompile.serving.chats.tools import AUTO, NONE, REQUIRED, ToolUse, tool_use_of


def tools(*names: str, **function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name} | function} for name in names]


TWO = tools("f", "g")
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize("choice", [AUTO, NONE, REQUIRED])
def test_a_choice_of_all(choice: str) -> None:
    use = tool_use_of(TWO, choice, True)
    assert use == ToolUse(tuple(TWO), choice) and use.functions == [{"name": "f"}, {"name": "g"}]


def test_a_choice_by_name() -> None:
    use = tool_use_of(TWO, NAMED, False)
    assert use == ToolUse(tuple(TWO), REQUIRED, "g", False) and use.functions == [{"name": "g"}]


def test_no_tools() -> None:
    assert tool_use_of([], AUTO, True) is tool_use_of([], NONE, True) is None


BAD: dict[str, tuple[Any, Any, str]] = {
    "no list": ({}, AUTO, "tools must be a list"),
    "no function": ([1], AUTO, r"tools\[0\] must be"),
    "another type": ([*TWO, {"type": "web", "function": {}}], AUTO, r"tools\[2\] must be"),
    "no name": (tools(None), AUTO, r"tools\[0\].function.name must be"),  # type: ignore[arg-type]
    "a space": (tools("a b"), AUTO, r"tools\[0\].function.name must be"),
    "a quote": (tools('a"'), AUTO, r"tools\[0\].function.name must be"),
    "a bracket": (tools("a>"), AUTO, r"tools\[0\].function.name must be"),
    "empty": (tools(""), AUTO, r"tools\[0\].function.name must be"),
    "long": (tools("a" * 129), AUTO, r"tools\[0\].function.name must be"),
    "twice": (tools("f", "g", "f"), AUTO, "different names, got 'f' twice"),
    "description": (tools("f", description=1), AUTO, "function.description must be a text"),
    "schema": (tools("f", parameters=[]), AUTO, "a JSON schema of an object"),
    "array": (tools("f", parameters={"type": "array"}), AUTO, "a JSON schema of an object"),
    "properties": (tools("f", parameters={"properties": {"a": 1}}), AUTO, "a JSON schema"),
    "required": (tools("f", parameters={"required": "a"}), AUTO, "a JSON schema of an object"),
    "choice": (TWO, "any", "must be auto, none, required, or name a function"),
    "unknown": (TWO, {"type": "function", "function": {"name": "h"}}, "one of tools, got 'h'"),
    "no name of a choice": (TWO, {"type": "function"}, "tool_choice must be {"),
    "type of a choice": (TWO, NAMED | {"type": "web"}, "tool_choice must be {"),
    "nothing to require": ([], REQUIRED, "tool_choice needs tools, got none"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tools(name: str) -> None:
    listed, choice, message = BAD[name]
    with pytest.raises(UsageError, match=message):
        tool_use_of(listed, choice, True)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {"a": True}}])
def test_schemas_of_parameters(parameters: Any) -> None:
    assert tool_use_of(tools("a" * 128, parameters=parameters), AUTO, True) is not None
