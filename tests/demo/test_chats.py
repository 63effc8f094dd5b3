"""Chats: every question has its call and its answer, and training leaves some questions out."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from typing import Any

import pytest

from tpcompile.demo.chats import TOOLS, UNKNOWN, Chat, chats

SOME = 300


def _drawn(held_out: bool = False) -> list[Chat]:
    return list(islice(chats(1, held_out), SOME))


def _contents(drawn: list[Chat], role: str) -> set[str]:
    return {turn["content"] for chat in drawn for turn in chat.messages if turn["role"] == role}


def _questions(drawn: list[Chat]) -> set[str]:
    """Return the questions that are followed by a call."""
    pairs = [pair for chat in drawn for pair in pairwise(chat.messages)]
    return {question["content"] for question, answer in pairs if "tool_calls" in answer}


def test_a_seed_gives_the_same_chats() -> None:
    assert [*islice(chats(1), 5)] == [*islice(chats(1), 5)] != [*islice(chats(2), 5)]


def test_training_leaves_questions_out() -> None:
    learned, tested = (_questions(_drawn(held_out)) for held_out in (False, True))
    assert not learned & tested
    assert len(tested) > SOME / 4


def test_calls_have_the_arguments_of_the_question() -> None:
    called = set()
    for chat in _drawn():
        offered = {tool["function"]["name"] for tool in chat.tools}
        for question, answer in pairwise(chat.messages):
            for call in answer.get("tool_calls", ()):
                function = call["function"]
                called.add(function["name"])
                assert function["name"] in offered
                assert list(function["arguments"]) == [*TOOLS[function["name"]].parameters]
                words = question["content"].replace("?", " ").replace(".", " ").split()
                assert {str(value) for value in function["arguments"].values()} <= set(words)
    assert called == set(TOOLS)


def test_without_the_tool_there_is_no_call() -> None:
    refused = _contents(_drawn(), "assistant") & {
        f"I have no tool for the {tool.topic}." for tool in TOOLS.values()
    }
    assert len(refused) == len(TOOLS)


def test_words_without_meaning_have_an_answer() -> None:
    assert UNKNOWN in _contents(_drawn(), "assistant")


@pytest.mark.parametrize("name", TOOLS)
def test_results_are_text_or_json(name: str) -> None:
    facts: dict[str, Any] = {"city": "Rome", "sky": "hot", "hour": 7, "a": 1, "b": 2, "sum": 3}
    for form in TOOLS[name].results:
        text = form.format(**facts)
        assert "{" not in text or json.loads(text)
