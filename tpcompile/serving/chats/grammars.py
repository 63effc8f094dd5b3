"""Grammars of calls: the forms of `forms.py` in llguidance's form of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tpcompile.serving.chats.calls import Tools
from tpcompile.serving.chats.marks import END_OF_TOOL_CALL, TOOL_CALL
from tpcompile.serving.chats.values import is_text, schemas

Literal = Callable[[str], str]
"""Return how a grammar spells a mark: a text, or a special token."""
_ANY = {"type": "object"}
_STYLE = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": True,
    "coerce_one_of": True,
}
"""The format of JSON: as templates show it to the model. Parts of schemas that llguidance does not
support are ignored, since functions check their arguments themselves."""


def quoted(text: str) -> str:
    """Return a text as a grammar spells it."""
    return json.dumps(text)


_END_OF_VALUE = quoted("\n</parameter>\n")


def json_calls(tools: Tools, literal: Literal, parallel: bool) -> str:
    """Return a grammar of calls as Qwen3 writes them."""
    rules = _calls(len(tools), literal, parallel)
    for number, tool in enumerate(tools):
        head = quoted(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
        schema = _json(tool.get("parameters") or _ANY)
        rules += [f'tool_{number}: {head} arguments_{number} "}}"']
        rules += [f"arguments_{number}: {schema}"]
    return "\n".join(rules)


def element_calls(tools: Tools, literal: Literal, parallel: bool) -> str:
    """Return a grammar of calls as Qwen3-Coder writes them, with parameters in their order."""
    text = f"text[suffix={_END_OF_VALUE}]: /(?s:.*)/"
    rules = [*_calls(len(tools), literal, parallel), text]
    for number, tool in enumerate(tools):
        parameters = tool.get("parameters") or _ANY
        required, parts = parameters.get("required", ()), []
        for place, (name, schema) in enumerate(schemas(parameters).items()):
            rule = f"parameter_{number}_{place}"
            parts.append(rule if name in required else f"{rule}?")
            values = _values(parameters, name, schema)
            rules.append(
                f"{rule}: {quoted(f'<parameter={name}>' + chr(10))} value_{number}_{place}"
            )
            rules.append(f"value_{number}_{place}: {values}")
        begin, end = quoted(f"<function={tool['name']}>\n"), quoted("</function>")
        rules.append(" ".join([f"tool_{number}:", begin, *parts, end]))
    return "\n".join(rules)


def _calls(count: int, literal: Literal, parallel: bool) -> list[str]:
    again = ' ("\\n" call)*' if parallel else ""
    marks = f'{literal(TOOL_CALL)} "\\n" tool "\\n" {literal(END_OF_TOOL_CALL)}'
    tools = " | ".join(f"tool_{number}" for number in range(count))
    return [f"start: call{again}", f"call: {marks}", f"tool: {tools}"]


def _values(parameters: Any, name: str, schema: Any) -> str:
    """Return the rule of the values of a parameter, each with the end of its element."""
    if not is_text(parameters, name):
        return f"{_json(_with_definitions(schema, parameters))} {_END_OF_VALUE}"
    texts = schema.get("enum") if isinstance(schema, dict) else None
    return " | ".join(quoted(text) + _END_OF_VALUE for text in texts) if texts else "text"


def _json(schema: Any) -> str:
    if not isinstance(schema, dict):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': _STYLE})}"


def _with_definitions(schema: Any, root: Any) -> Any:
    """Return a part of a schema with the definitions of the whole, to which it may refer."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **schema} if isinstance(schema, dict) else schema
