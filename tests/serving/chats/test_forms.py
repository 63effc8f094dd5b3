"""The form of a model's calls: by its chat template, by name, and from a plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tpcompile.errors import UsageError
from tpcompile.serving.chats import forms
from tpcompile.serving.chats.calls import Tools
from tpcompile.serving.chats.events import Arguments, Begin, Complete, Event, Text
from tpcompile.serving.chats.forms import TOOL_FORMS, ToolForm, form_of

QWEN3 = (
    r"""{{- "…<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n"""
    r"""</tool_call>" }}"""
)
CODER = r"{{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}"
BOTH = QWEN3 + CODER
OTHER_MARKS = r"""{{ '<function=' + name }}{"arguments": }"""
GLM = r"{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        *((QWEN3, "hermes"), (CODER, "qwen3-coder"), (BOTH, "qwen3-coder")),
        *((GLM, None), (OTHER_MARKS, None), ("", None)),
    ],
)
def test_the_template_decides(template: str, name: str | None) -> None:
    form = form_of("auto", template)
    assert form is (None if name is None else TOOL_FORMS[name])
    assert form_of("none", template) is None
    assert form_of("Hermes", template) is TOOL_FORMS["hermes"]


def test_packages_are_loaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ToolForm(Commands, lambda template: False)
    monkeypatch.setattr(forms, "load_plugins", lambda: TOOL_FORMS.add("plain", plain))
    try:
        assert form_of("plain", "") is plain
    finally:
        del TOOL_FORMS._entries["plain"]


def test_an_unknown_name() -> None:
    with pytest.raises(UsageError, match=r"Unknown tool parser 'herms'.*hermes"):
        form_of("herms", "")


class Commands:
    """A parser of lines such as `!name`, as a package could have it."""

    def __init__(self, tools: Tools) -> None:
        self._names = {tool["name"] for tool in tools}
        self._line = ""

    def push(self, text: str) -> list[Event]:
        *lines, self._line = (self._line + text).split("\n")
        return [event for line in lines for event in self._read(line, "\n")]

    def end(self) -> list[Event]:
        return [*self._read(self._line, "")]

    def _read(self, line: str, end: str) -> Iterator[Event]:
        if line[:1] == "!" and line[1:] in self._names:
            yield from (Begin(line[1:]), Arguments("{}"), Complete())
        else:
            yield Text(line + end)


def test_a_form_of_a_package() -> None:
    commands = ToolForm(Commands, lambda template: "!NAME" in template)
    TOOL_FORMS.add("commands", commands)
    try:
        form = form_of("auto", "Call a tool: !NAME")
        assert form is commands
        parser = form.parser([{"name": "f"}])
        assert parser.push("a\n!f\n!g") == [Text("a\n"), Begin("f"), Arguments("{}"), Complete()]
        assert parser.end() == [Text("!g")]
    finally:
        del TOOL_FORMS._entries["commands"]
