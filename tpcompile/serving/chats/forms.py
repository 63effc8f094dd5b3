"""The forms in which models call tools. A package can add its own to `TOOL_FORMS`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tpcompile.plugins import load_plugins
from tpcompile.registry import Registry
from tpcompile.serving.chats.calls import MarkedCalls, Reader, ToolParser, Tools
from tpcompile.serving.chats.grammars import Literal, element_calls, json_calls
from tpcompile.serving.chats.hermes import JsonCall
from tpcompile.serving.chats.marks import END_OF_TOOL_CALL, TOOL_CALL
from tpcompile.serving.chats.xml import ElementCall


@dataclass(frozen=True)
class ToolForm:
    """A form in which models call tools."""

    parser: Callable[[Tools], ToolParser]
    """Make a parser of one continuation, for the functions of its request."""
    fits: Callable[[str], bool]
    """Return whether models with a chat template write this form."""
    grammar: Callable[[Tools, Literal, bool], str] | None = None
    """Return a grammar of calls, as `Structure` has it: of one, or of several if the flag is set.
    Marks are spelled by the `Literal`. Without a grammar, no call can be required."""
    marks: tuple[str, ...] = ()
    """Texts that are part of the form also where they are special tokens."""


TOOL_FORMS: Registry[ToolForm] = Registry("tool parser")
"""The first form that fits a template is chosen."""
AUTO, NONE = "auto", "none"
_JSON_CALL = re.compile(r'"arguments\\?": ')
"""What templates of models contain that write calls as JSON, also within a string."""


def form_of(name: str, template: str) -> ToolForm | None:
    """Return the form of a name, or with "auto" the one that fits a chat template, if any does."""
    load_plugins()
    if name == NONE:
        return None
    if name != AUTO:
        return TOOL_FORMS[name]
    return next((form for form in TOOL_FORMS.values() if form.fits(template)), None)


def _marked(reader: Callable[[Tools], Reader], tools: Tools) -> ToolParser:
    return MarkedCalls(partial(reader, tools), TOOL_CALL, END_OF_TOOL_CALL)


TOOL_FORMS.add(
    "qwen3-coder",
    ToolForm(
        partial(_marked, ElementCall),
        lambda template: TOOL_CALL in template and "<function=" in template,
        element_calls,
        (TOOL_CALL, END_OF_TOOL_CALL),
    ),
)
TOOL_FORMS.add(
    "hermes",
    ToolForm(
        partial(_marked, JsonCall),
        lambda template: TOOL_CALL in template and bool(_JSON_CALL.search(template)),
        json_calls,
        (TOOL_CALL, END_OF_TOOL_CALL),
    ),
)
