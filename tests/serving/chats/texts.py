"""Random texts of assistants: calls in several forms, complete, cut off or damaged."""

from __future__ import annotations

import json
import random
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "q": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"type": "array"},
        "z": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}
TOOLS = [{"name": name, "parameters": PARAMETERS} for name in ("f", "go", "größe")]
_WORDS = (
    *("a", "Hi", " ", "\n", "né", "日本", "🐈", "<", ">", "</", "{", "}", '"', "\\", "[", ":", ","),
    *(BEGIN, END, "</tool", "<tool_", "</parameter>", "<parameter=", "</function>", "\\n", "\n\n"),
)


def text_of(rng: random.Random, most: int = 3) -> str:
    """Return a text of some words, which may look like marks."""
    return "".join(rng.choice(_WORDS) for _ in range(rng.randrange(most)))


def value_of(rng: random.Random, kind: str) -> Any:
    """Return a value for a parameter of `PARAMETERS`."""
    values = {
        "q": lambda: text_of(rng),
        "n": lambda: rng.choice((0, -7, 10**20)),
        "x": lambda: rng.choice((0.5, -1e-7, 3)),
        "b": lambda: rng.random() < 0.5,
        "o": lambda: {text_of(rng, 2): [text_of(rng), None]},
        "l": lambda: [text_of(rng), {}, [1]],
        "z": lambda: rng.choice((None, 4)),
    }
    return values[kind]()


def arguments_of(rng: random.Random) -> dict[str, Any]:
    """Return arguments of a call."""
    names = list(PARAMETERS["properties"])
    return {name: value_of(rng, name) for name in rng.sample(names, rng.randrange(3))}


def hermes(rng: random.Random, name: str, arguments: dict[str, Any]) -> str:
    """Return a call as Qwen3 writes it, spaced and ordered in some way."""
    separators = rng.choice(((", ", ": "), (",", ":"), (" , ", " :\n")))
    call = {"name": name, "arguments": arguments}
    if rng.random() < 0.2:
        call = {"arguments": arguments, "name": name}
    if rng.random() < 0.1:
        call = {"id": {"a": []}} | call
    return json.dumps(call, ensure_ascii=rng.random() < 0.3, separators=separators)


def elements(rng: random.Random, name: str, arguments: dict[str, Any]) -> str:
    """Return a call as Qwen3-Coder writes it."""
    space = rng.choice(("\n", "", " \n"))
    parts = [f"<function={name}>"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parts.append(f"<parameter={key}>\n{text}\n</parameter>")
    return space.join([*parts, "</function>"])


def damaged(rng: random.Random, text: str) -> str:
    """Return a text with a character removed, doubled or replaced."""
    place = rng.randrange(len(text))
    new = rng.choice(("", text[place] * 2, rng.choice('{}"<>\n,x\\')))
    return text[:place] + new + text[place + 1 :]


def random_text(rng: random.Random, form: Any) -> str:
    """Return the text of an assistant with some calls, which may be cut off or damaged."""
    text = text_of(rng)
    for _ in range(rng.choice((1, 1, 2))):
        call = form(rng, rng.choice(TOOLS)["name"], arguments_of(rng))
        space = rng.choice(("\n", "", "\n\n"))
        text += f"{BEGIN}{space}{call}{space}{rng.choice((END, END, END, ''))}{text_of(rng)}"
    if rng.random() < 0.3:
        text = damaged(rng, text)
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.5 else text
