"""Messages of a chat as templates take them, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tpcompile.errors import UsageError
from tpcompile.serving.chats.history import history_of


def said(**message: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": None} | message]


def call(**function: Any) -> list[dict[str, Any]]:
    return said(tool_calls=[{"id": "1", "type": "function", "function": function}])


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_messages() -> None:
    assert history_of(user(PARTS)) == user("ab")
    named = [{"role": "tool", "content": "a", "tool_call_id": "1", "name": "f"}]
    assert history_of([named[0] | {"refusal": None}]) == named
    thought = said(reasoning_content="Hm.")
    assert history_of(thought) == [thought[0] | {"content": ""}]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [('{"a": "é"}', {"a": "é"}), ({"a": 1}, {"a": 1}), ("", {}), (" ", {}), (None, {})],
)
def test_arguments_are_objects(arguments: Any, value: Any) -> None:
    (message,) = history_of(call(name="f", arguments=arguments))
    function = {"name": "f", "arguments": value}
    assert message["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert message["content"] == ""


BAD: dict[str, tuple[Any, str]] = {
    "none": ([], "messages must be a list that is not empty"),
    "no list": ({"role": "user"}, "messages must be a list"),
    "no role": ([{"content": "a"}], r"messages\[0\] must have a role"),
    "a text": (["a"], r"messages\[0\] must have a role"),
    "no content": (said(), r"messages\[0\].content must be a text"),
    "no content of a user": ([*user("a"), *user(None)], r"messages\[1\].content must be a text"),
    "a thought of a user": (
        [user(None)[0] | {"reasoning_content": "a"}],
        r"messages\[0\].content must be a text",
    ),
    "an image": (user([*PARTS, {"type": "image_url"}]), "content must be a text, or a list of"),
    "calls that are no list": (said(tool_calls={"a": 1}), r"\[0\].tool_calls must be a list"),
    "calls of a user": ([user("a")[0] | {"tool_calls": [1]}], "in a message of the assistant"),
    "a call": (said(tool_calls=[1]), r"messages\[0\].tool_calls\[0\] must have a function"),
    "no name": (call(arguments="{}"), "must have a function with a name"),
    "an id": (said(tool_calls=[{"id": 1, "function": {"name": "f"}}]), r"\.id must be a text"),
    "a number": (call(name="f", arguments=3), "function.arguments must be a JSON object"),
    "no JSON": (call(name="f", arguments="{"), "function.arguments must be JSON"),
    "a list": (call(name="f", arguments="[]"), "arguments must be a JSON object"),
    "deep": (call(name="f", arguments="[" * 100_000), "arguments must be JSON"),
    "half of a pair": (call(name="f", arguments='{"a": "\\ud800"}'), "must be JSON, in UTF-8"),
    "the id of a result": (said(role="tool", content="a", tool_call_id=1), "tool_call_id must be"),
    "a thought": (said(content="a", reasoning_content=1), "reasoning_content must be a text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_messages(name: str) -> None:
    messages, error = BAD[name]
    with pytest.raises(UsageError, match=error):
        history_of(messages)
