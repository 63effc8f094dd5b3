"""The chats of the demo model with tools: questions, calls, results and answers of a small world.

Each question needs one tool. Where the tool is offered, the model calls it with arguments that it
copies from the question, and then answers with what it copies from the result.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpcompile.demo.text import PEOPLE

_CITIES = (
    "Athens Berlin Boston Cairo Chicago Delhi Dublin Geneva Hamburg Helsinki Kyoto Lima Lisbon "
    "London Madrid Munich Naples Oslo Paris Prague Rome Seoul Sydney Tokyo Toronto Vienna Warsaw "
    "Zurich"
)
_WEATHER = "cloudy cold foggy hot rainy snowy stormy sunny warm windy"
_WORDS = (
    "a an the of for in to and or current given name text list value number place tool result get "
    "returns return find search user local date today city cities weather time add sum numbers "
    "integer string two first second final send mail news file read write price stock page"
)
CITIES, WEATHER, WORDS = (tuple(text.split()) for text in (_CITIES, _WEATHER, _WORDS))
"""The cities and kinds of weather of the world, and words of descriptions without meaning."""

Values = dict[str, Any]


class Question(NamedTuple):
    """A question, with the call that it needs."""

    text: str
    tool: str
    values: Values


@dataclass(frozen=True)
class Sample:
    """The parts of a prompt, and the text that the model learns to write after it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    thinking: bool
    thoughts: str
    answer: str


@dataclass(frozen=True)
class Tool:
    """A tool that the model can call."""

    parameters: dict[str, str]
    """The JSON type by name."""
    questions: tuple[str, ...]
    draw: Callable[[random.Random], Values]
    """Draw arguments."""
    results: tuple[str, ...]
    """Forms of results, from the simplest on."""
    measure: Callable[[random.Random, Values], Values]
    """Draw what a result states."""
    answer: str
    topic: str


def _sum(draw: random.Random, values: Values) -> Values:
    return {"sum": values["a"] + values["b"]}


TOOLS = {
    "get_weather": Tool(
        {"city": "string"},
        (
            "What is the weather in {city}?",
            "What's the weather in {city}?",
            "What is the weather like in {city}?",
            "What's the weather like in {city} today?",
            "How is the weather in {city}?",
            "How is the weather in {city} today?",
            "Tell me the weather in {city}.",
            "Weather in {city}?",
            "Is it {sky} in {city}?",
        ),
        lambda draw: {"city": draw.choice(CITIES)},
        (
            "{sky}",
            "It is {sky} in {city}.",
            "It's {sky} in {city}",
            "It is always {sky} in {city}!",
            "{sky}, {degrees} degrees",
            "{sky} and {degrees}",
            '{{"weather": "{sky}"}}',
            '{{"city": "{city}", "weather": "{sky}", "degrees": {degrees}}}',
            '{{"temperature": {degrees}, "condition": "{sky}"}}',
            '{{"forecast": "{sky}", "location": "{city}"}}',
        ),
        lambda draw, _: {"sky": draw.choice(WEATHER), "degrees": draw.randrange(40)},
        "It is {sky} in {city}.",
        "weather",
    ),
    "get_time": Tool(
        {"city": "string"},
        (
            "What time is it in {city}?",
            "What is the time in {city}?",
            "What's the time in {city} now?",
            "How late is it in {city}?",
            "Tell me the time in {city}.",
            "Time in {city}?",
        ),
        lambda draw: {"city": draw.choice(CITIES)},
        (
            "{time}",
            "It is {time} in {city}.",
            '{{"time": "{time}"}}',
            '{{"city": "{city}", "time": "{time}"}}',
        ),
        lambda draw, _: {"time": f"{draw.randrange(24):02}:{draw.randrange(60):02}"},
        "It is {time} in {city}.",
        "time",
    ),
    "add": Tool(
        {"a": "integer", "b": "integer"},
        (
            "What is {a} plus {b}?",
            "What's {a} plus {b}?",
            "How much is {a} plus {b}?",
            "What is {a} + {b}?",
            "Add {a} and {b}.",
            "Compute {a} + {b}.",
        ),
        lambda draw: {name: draw.randrange(100) for name in "ab"},
        ("{sum}", "{sum}.0", '{{"result": {sum}}}', '{{"sum": {sum}}}', "The result is {sum}."),
        _sum,
        "{a} plus {b} is {sum}.",
        "sum",
    ),
}

SMALL_TALK = (
    ("Hello!", "The user greets me.", "Hello! How can I help you?"),
    ("Hello", "The user greets me.", "Hello! How can I help you?"),
    ("Hi", "The user greets me.", "Hello! How can I help you?"),
    ("Hi there!", "The user greets me.", "Hello! How can I help you?"),
    ("Good morning!", "The user greets me.", "Hello! How can I help you?"),
    ("How are you?", "The user asks how I am.", "I am fine, thank you."),
    ("Who are you?", "The user asks who I am.", "I am a small model that can call tools."),
    ("What are you?", "The user asks who I am.", "I am a small model that can call tools."),
    ("What can you do?", "The user asks what I can do.", "I can call tools and tell stories."),
    ("Thank you!", "The user thanks me.", "You are welcome."),
    ("Thanks!", "The user thanks me.", "You are welcome."),
    ("Tell me a joke.", "The user asks for a joke.", "I only know stories of a village."),
)
_ABOUT_PEOPLE = (
    ("Who is {name}?", "{name} is a {trade} who lives {home}."),
    ("Where does {name} live?", "{name} is a {trade} who lives {home}."),
    ("Which animal does {name} have?", "The {animal} of {name} is called {pet}."),
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Use the tools.",
    "Answer in one sentence.",
    "Be brief.",
)
_BEFORE = ("Please tell me: ", "Hello! ", "Hi! ", "Please: ")
_AFTER = (" Please use a tool.", " Thanks!", " Use the tools.", " Answer in one sentence.")
_FAILURES = ("Error: no such city", "error", "Error executing tool", '{"error": "timeout"}')
_FAILED = "The tool failed."
_EARLIER = (0, 0, 0, 1, 2, 4, 5, 6, 7, 8)
"""Numbers of earlier questions of a chat. Long chats have much to learn for each description."""

_OTHER_VERBS = ("search", "send", "read", "final", "list", "find", "write", "get")
_OTHER_NOUNS = ("result", "mail", "news", "file", "price", "page", "text", "stock")


def draw_question(draw: random.Random) -> Question:
    """Draw a question that needs a tool."""
    name = draw.choice(tuple(TOOLS))
    tool = TOOLS[name]
    values = tool.draw(draw)
    text = draw.choice(tool.questions).format(**values, sky=draw.choice(WEATHER))
    return Question(text, name, values)


def call_text(name: str, values: Values) -> str:
    """Return a call as Qwen3 writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(values)}}}\n</tool_call>'


def samples(seed: int, short: bool = False) -> Iterator[Sample]:
    """Yield samples without end. Short ones have one question, and no descriptions of tools."""
    draw = random.Random(seed)
    while True:
        yield _continued([], [], [*TOOLS], draw) if short else _sample(draw)


def _sample(draw: random.Random) -> Sample:
    offered = draw.sample(tuple(TOOLS), draw.choice((0, 1, 1, 2, 3)))
    tools = [_schema(name, TOOLS[name].parameters, draw) for name in offered]
    for _ in range(draw.choice((0, 0, 0, 0, 1, 2)) if tools else 0):
        name = f"{draw.choice(_OTHER_VERBS)}_{draw.choice(_OTHER_NOUNS)}"
        tools.append(_schema(name, {draw.choice(WORDS): "string"}, draw))
    draw.shuffle(tools)
    messages = []
    if draw.random() < 0.4:
        text = draw.choice(_SYSTEM) if draw.random() < 0.7 else _noise(draw)
        messages.append({"role": "system", "content": text})
    for _ in range(draw.choice(_EARLIER)):
        messages += _exchange(draw, offered).messages
    return _continued(messages, tools, offered, draw)


def _continued(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    offered: list[str],
    draw: random.Random,
) -> Sample:
    """Return a chat that goes on with another question."""
    thinking = draw.random() < 0.6
    exchange = _exchange(draw, offered)
    turns = [index for index, part in enumerate(exchange.messages) if part["role"] == "assistant"]
    place = draw.choice(turns)
    before = exchange.messages[:place]
    if thinking and draw.random() < 0.5:  # some clients send thoughts back, others do not
        told = dict(zip(turns, exchange.thoughts, strict=True))
        before = [
            {**part, "reasoning_content": told[index]} if index in told else part
            for index, part in enumerate(before)
        ]
    thoughts = exchange.thoughts[turns.index(place)]
    return Sample(messages + before, tools, thinking, thoughts, _written(exchange.messages[place]))


class _Exchange(NamedTuple):
    """A question and what follows to its answer, with the thoughts of each turn of the model."""

    messages: list[dict[str, Any]]
    thoughts: list[str]


def _exchange(draw: random.Random, offered: list[str]) -> _Exchange:
    if draw.random() < 0.25:
        return _talk(draw)
    wanted = [draw_question(draw) for _ in range(draw.choice((1, 1, 1, 2)))]
    if offered and draw.random() < 0.8:
        while any(question.tool not in offered for question in wanted):
            wanted = [draw_question(draw) for _ in wanted]
    text = _joined([question.text for question in wanted], draw)
    missing = [question for question in wanted if question.tool not in offered]
    ask = {"role": "user", "content": text}
    if missing:
        topic = TOOLS[missing[0].tool].topic
        answer = {"role": "assistant", "content": f"I have no tool for the {topic}."}
        return _Exchange([ask, answer], [f"There is no tool for the {topic}."])
    thoughts = " ".join(_plan(question) for question in wanted)
    calls = [
        {"type": "function", "function": {"name": question.tool, "arguments": question.values}}
        for question in wanted
    ]
    results, answers = zip(*(_result(question, draw) for question in wanted), strict=True)
    return _Exchange(
        [
            ask,
            {"role": "assistant", "content": "", "tool_calls": calls},
            *({"role": "tool", "content": result} for result in results),
            {"role": "assistant", "content": " ".join(answers)},
        ],
        [thoughts, "I have the result." if len(wanted) == 1 else "I have the results."],
    )


def _plan(question: Question) -> str:
    values = " and ".join(str(value) for value in question.values.values())
    topic = TOOLS[question.tool].topic
    word = "of" if question.tool == "add" else "in"
    return f"The user asks for the {topic} {word} {values}. I call {question.tool}."


def _talk(draw: random.Random) -> _Exchange:
    if draw.random() < 0.6:
        text, thoughts, answer = draw.choice(SMALL_TALK)
    else:
        person = draw.choice(PEOPLE)
        text, answer = (form.format(**person._asdict()) for form in draw.choice(_ABOUT_PEOPLE))
        thoughts = f"The user asks about {person.name}."
    return _Exchange(
        [{"role": "user", "content": text}, {"role": "assistant", "content": answer}], [thoughts]
    )


def _result(question: Question, draw: random.Random) -> tuple[str, str]:
    """Draw the result of a call, and return it with the answer."""
    tool = TOOLS[question.tool]
    if draw.random() < 0.05:
        return draw.choice(_FAILURES), _FAILED
    facts = question.values | tool.measure(draw, question.values)
    return draw.choice(tool.results).format(**facts), tool.answer.format(**facts)


def _joined(texts: list[str], draw: random.Random) -> str:
    text = texts[0] if len(texts) == 1 else draw.choice((" ", " And ", "\n")).join(texts)
    before = draw.choice(_BEFORE) if draw.random() < 0.15 else ""
    after = draw.choice(_AFTER) if draw.random() < 0.15 else ""
    return before + text + after


def _written(message: dict[str, Any]) -> str:
    """Return a message of the assistant as the model writes it."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [call_text(call["name"], call["arguments"]) for call in calls]
    return str(message["content"]) + "\n".join(texts)


def _noise(draw: random.Random) -> str:
    """Draw a text without meaning, so that the model learns to ignore descriptions."""
    words = [draw.choice(WORDS) for _ in range(draw.randrange(1, 9))]
    if draw.random() < 0.3:
        letters = "abcdefghijklmnopqrstuvwxyzABCDE_"
        word = "".join(draw.choice(letters) for _ in range(draw.randrange(2, 9)))
        words[draw.randrange(len(words))] = word
    return (" ".join(words) + draw.choice((".", ""))).capitalize()


def _schema(name: str, parameters: dict[str, str], draw: random.Random) -> dict[str, Any]:
    """Draw the description of a tool, as one of several clients writes it."""
    described, titled, strict = (draw.random() < 0.5 for _ in range(3))
    properties = {}
    for key, kind in parameters.items():
        fields: dict[str, Any] = {"type": kind}
        if described:
            fields["description"] = _noise(draw)
        if titled:
            fields["title"] = key.capitalize()
        properties[key] = _shuffled(fields, draw)
    body: dict[str, Any] = {
        "type": "object", "properties": properties, "required": list(parameters)
    }  # fmt: skip
    if strict:
        body["additionalProperties"] = False
    if titled and draw.random() < 0.5:
        body["title"] = f"{name}Arguments"
    function: dict[str, Any] = {"name": name, "parameters": _shuffled(body, draw)}
    if draw.random() < 0.8:
        function["description"] = _noise(draw)
    if strict:
        function["strict"] = draw.random() < 0.8
    return {"type": "function", "function": _shuffled(function, draw)}


def _shuffled(values: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Change the order of keys in half of the cases."""
    keys = list(values)
    if draw.random() < 0.5:
        draw.shuffle(keys)
    return {key: values[key] for key in keys}
