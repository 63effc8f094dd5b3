"""The chats that the demo model with tools learns: questions, calls, results and answers."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpcompile.demo.text import PEOPLE, all_sentences

_CITIES = (
    "Athens Berlin Boston Cairo Chicago Delhi Dublin Geneva Hamburg Helsinki Kyoto Lima Lisbon "
    "London Madrid Munich Naples Oslo Paris Prague Rome Seoul Sydney Tokyo Toronto Vienna Warsaw "
    "Zurich"
)
_SKIES = "cloudy cold foggy hot rainy snowy stormy sunny warm windy"
CITIES, SKIES = _CITIES.split(), _SKIES.split()


@dataclass(frozen=True)
class Tool:
    """A tool that the model can call, with forms of the texts about it."""

    parameters: tuple[str, ...]
    questions: tuple[str, ...]
    results: tuple[str, ...]
    answer: str
    topic: str


TOOLS = {
    "get_weather": Tool(
        ("city",),
        (
            "What is the weather in {city}?",
            "What is the weather like in {city}?",
            "What's the weather in {city}?",
            "How is the weather in {city}?",
            "How is the weather in {city} today?",
            "Tell me the weather in {city}.",
            "Weather in {city}?",
        ),
        (
            "{sky}",
            "It is {sky} in {city}.",
            '{{"weather": "{sky}"}}',
            '{{"city": "{city}", "weather": "{sky}"}}',
        ),
        "It is {sky} in {city}.",
        "weather",
    ),
    "get_time": Tool(
        ("city",),
        (
            "What time is it in {city}?",
            "What is the time in {city}?",
            "What's the time in {city}?",
            "Tell me the time in {city}.",
            "Time in {city}?",
        ),
        (
            "{hour}:00",
            "It is {hour}:00 in {city}.",
            '{{"time": "{hour}:00"}}',
            '{{"city": "{city}", "time": "{hour}:00"}}',
        ),
        "It is {hour}:00 in {city}.",
        "time",
    ),
    "add": Tool(
        ("a", "b"),
        (
            "What is {a} plus {b}?",
            "What is {a} + {b}?",
            "How much is {a} plus {b}?",
            "Add {a} and {b}.",
        ),
        ("{sum}", '{{"sum": {sum}}}', '{{"result": {sum}}}', "The sum is {sum}."),
        "The sum is {sum}.",
        "sum",
    ),
}

SMALL_TALK = {
    "Hello!": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "Good morning!": "Hello! How can I help you?",
    "How are you?": "I am fine, thank you.",
    "Who are you?": "I am a small model that can call tools.",
    "What can you do?": "I can call tools.",
    "Goodbye!": "Goodbye! See you soon.",
    "What is your name?": "My name is Demo.",
    "Thank you!": "You are welcome.",
    "Thanks!": "You are welcome.",
    **{f"Who is {person.name}?": f"{person.name} is a {person.trade}." for person in PEOPLE},
}
"""Questions that need no tool, and their answers."""
UNKNOWN = "I only know the weather, the time, sums and people."
"""The answer to unknown words."""

_SYSTEM = ("You are a helpful assistant.", "Be brief.", "Use the tools.")
_OTHER_TOOLS = ("search", "send_mail", "read_file", "final_result")
_OTHER_PARAMETERS = ("text", "name", "query", "path")


class Chat(NamedTuple):
    """Messages, and the tools that their request offers."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def chats(seed: int, held_out: bool = False) -> Iterator[Chat]:
    """Yield chats endlessly: those of training, or those with held-out questions."""
    draw = random.Random(seed)
    words = sorted({word for sentence in all_sentences() for word in sentence.split()})
    while True:
        offered = draw.sample(list(TOOLS), draw.choice((0, 1, 2, 3, 3)))
        tools = [_described(name, TOOLS[name].parameters) for name in offered]
        if draw.random() < 0.3:
            other = _described(draw.choice(_OTHER_TOOLS), [draw.choice(_OTHER_PARAMETERS)])
            tools.insert(draw.randrange(len(tools) + 1), other)
        messages = []
        if draw.random() < 0.3:
            messages.append({"role": "system", "content": draw.choice(_SYSTEM)})
        for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
            messages += _exchange(draw, offered, held_out, words)
        yield Chat(messages, tools)


def _described(name: str, parameters: Iterable[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {} for key in parameters}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _exchange(
    draw: random.Random, offered: list[str], held_out: bool, words: list[str]
) -> list[dict[str, Any]]:
    """Draw a question and what follows it."""
    if draw.random() < 0.1:
        question = " ".join(draw.choices(words, k=draw.randrange(2, 8)))
        return [_message("user", question), _message("assistant", UNKNOWN)]
    if draw.random() < 0.3:
        question, answer = draw.choice(list(SMALL_TALK.items()))
        return [_message("user", question), _message("assistant", answer)]
    name = draw.choice(offered if offered and draw.random() < 0.8 else list(TOOLS))
    tool, question, facts = TOOLS[name], "", {}
    while not question or _is_held_out(question) != held_out:
        facts = _facts(draw)
        question = draw.choice(tool.questions).format(**facts)
    if name not in offered:
        answer = f"I have no tool for the {tool.topic}."
        return [_message("user", question), _message("assistant", answer)]
    arguments = {key: facts[key] for key in tool.parameters}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        _message("user", question),
        _message("assistant", "") | {"tool_calls": [call]},
        _message("tool", draw.choice(tool.results).format(**facts)),
        _message("assistant", tool.answer.format(**facts)),
    ]


def _is_held_out(question: str) -> bool:
    """Return whether training leaves out a question, which holds for one in ten."""
    return zlib.crc32(question.encode()) % 10 == 0


def _facts(draw: random.Random) -> dict[str, Any]:
    a, b = draw.randrange(100), draw.randrange(100)
    city, sky = draw.choice(CITIES), draw.choice(SKIES)
    return {"city": city, "sky": sky, "hour": draw.randrange(24), "a": a, "b": b, "sum": a + b}


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
