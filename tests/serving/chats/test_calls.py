"""Calls of tools within texts, cut at every place."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.serving.chats.texts import BEGIN, END, TOOLS, elements, hermes, random_text
from tpcompile.serving.chats.calls import MarkedCalls
from tpcompile.serving.chats.events import Arguments, Begin, Broken, Complete, Event, Text
from tpcompile.serving.chats.hermes import JsonCall
from tpcompile.serving.chats.xml import ElementCall

FORMS: dict[str, Any] = {
    "hermes": (hermes, lambda: MarkedCalls(partial(JsonCall, TOOLS), BEGIN, END)),
    "qwen3-coder": (elements, lambda: MarkedCalls(partial(ElementCall, TOOLS), BEGIN, END)),
}


def joined(events: list[Event]) -> list[Event]:
    """Return events with neighbouring pieces of text, and of arguments, made one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            result[-1] = Arguments(last.text + event.text)
        else:
            result.append(event)
    return result


def parsed(parser: MarkedCalls, *pieces: str) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.end()])


@pytest.mark.parametrize("texts", [500, pytest.param(2500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_random_texts_cut_at_every_place(form: str, texts: int) -> None:
    """The events do not depend on the cuts, and have all that the model wrote."""
    write, parser = FORMS[form]
    rng = random.Random(form)
    calls = broken = begun = 0
    for _ in range(texts):
        text = random_text(rng, write)
        whole = parsed(parser(), text)
        assert parsed(parser(), *text) == whole, text
        for place in range(1, len(text)):
            assert parsed(parser(), text[:place], text[place:]) == whole, (text, place)
        check_nothing_is_lost(form, text, whole)
        calls += sum(isinstance(event, Complete) for event in whole)
        broken += sum(isinstance(event, Broken) for event in whole)
        begun += sum(isinstance(event, Broken) and event.rest != event.whole for event in whole)
    assert calls > 0.4 * texts and broken > 0.2 * texts and begun > 0.04 * texts


def check_nothing_is_lost(form: str, text: str, events: list[Event]) -> None:
    """Check that events follow each other in a text, with nothing between them but the form."""
    place, name, arguments = 0, "", ""
    for event in events:
        match event:
            case Text(piece):
                assert text.startswith(piece, place)
                place += len(piece)
            case Begin(name):
                arguments = ""
            case Arguments(arguments):
                pass
            case Complete():
                place = call_end(form, text, place, name, json.loads(arguments))
                mark = re.compile(rf"\s*{END}").match(text, place)
                place = place if mark is None else mark.end()
            case Broken(whole, rest):
                assert text.startswith(whole, place)
                place += len(whole)
                assert whole.endswith(rest) and BEGIN in whole
                if rest != whole:
                    check_the_rest(form, whole.removesuffix(rest), name, arguments)
    assert not text[place:].strip() or (events and END.startswith(text[place:].strip()))


def check_the_rest(form: str, sent: str, name: str, arguments: str) -> None:
    """Check that the name and the arguments say all of the text that was sent as a call."""

    def read(text: str) -> list[Event]:
        return [event for event in parsed(FORMS[form][1](), text) if not isinstance(event, Text)]

    if form == "hermes":
        assert sent.endswith(arguments)
        pieces = [Arguments(arguments)] if arguments else []
        assert read(sent) == [Begin(name), *pieces, Broken(sent, "")]
        return
    assert any(
        read(f"{sent}{text}</function>") == [Begin(name), Arguments(arguments + end), Complete()]
        for text, end in _CLOSINGS
    )


_CLOSINGS = (
    *(("", "{}"), ("", "}")),
    *(("\n</parameter>", '"}'), ("\n\n</parameter>", '"}')),
)
"""Texts that close an element, and the ends of its arguments."""


def call_end(form: str, text: str, place: int, name: str, arguments: Any) -> int:
    """Return where a call ends, as a parser of whole texts reads it."""
    begin = re.compile(rf"\s*{BEGIN}\s*").match(text, place)
    assert begin is not None, (text, place)
    if form == "hermes":
        call, end = json.JSONDecoder().raw_decode(text, begin.end())
        assert (call["name"], call.get("arguments", {})) == (name, arguments)
        return end
    ends = [match.end() for match in re.finditer("</function>", text) if match.end() > begin.end()]
    return next(end for end in ends if element(text[begin.end() : end]) == (name, arguments))


_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*)</function>", re.DOTALL)
_VALUE = re.compile(
    r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|$)", re.DOTALL
)


def element(text: str) -> Any:
    """Return the name and the arguments of a whole call in Qwen3-Coder's form."""
    match = _FUNCTION.fullmatch(text)
    if match is None:
        return None
    known = match[1] in {tool["name"] for tool in TOOLS}
    values = {}
    for key, value in _VALUE.findall(match[2].strip()):
        values[key] = value
        with suppress(ValueError):
            as_json = json.loads(value)
            if known and type(as_json) in _TYPES.get(key, ()):
                values[key] = as_json
    return match[1], values


_TYPES: dict[str, tuple[type, ...]] = {
    "n": (int,),
    "x": (int, float),
    "b": (bool,),
    "o": (dict,),
    "l": (list,),
    "z": (int, type(None)),
}
