"""Thinking apart from text, cut at every place."""

from __future__ import annotations

import random

import pytest

from tpcompile.serving.chats.thinking import Thinking

CASES: dict[str, tuple[bool, str, str, str]] = {
    "both": (False, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
    "none": (False, "Yes.", "", "Yes."),
    "spaces before text": (False, " \n Yes.", "", " \n Yes."),
    "spaces before thinking": (False, " \n<think>a</think>b", "a", "b"),
    "empty": (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    "begun": (True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    "begun and cut off": (True, "\nHm.\n", "Hm.", ""),
    "cut off": (False, "<think>\nHm.\n</thi", "Hm.\n</thi", ""),
    "cut off after the mark": (False, "<think>", "", ""),
    "cut off in the mark": (False, "<thin", "", "<thin"),
    "another mark": (False, "<thinking>a", "", "<thinking>a"),
    "later": (False, "a <think>b</think>", "", "a <think>b</think>"),
    "twice": (False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    "within": (False, "<think>a<think>b</think>c", "a<think>b", "c"),
    "a call": (True, "a<tool_call></tool_call></think>b", "a<tool_call></tool_call>", "b"),
}


def split(inside: bool, *pieces: str) -> tuple[str, str]:
    thinking = Thinking(inside)
    parts = [*map(thinking.push, pieces), thinking.end()]
    return "".join(a for a, _ in parts), "".join(b for _, b in parts)


@pytest.mark.parametrize("name", CASES)
def test_thinking_and_text(name: str) -> None:
    inside, text, thought, answer = CASES[name]
    assert split(inside, text) == (thought, answer)


def test_random_texts_cut_at_every_place() -> None:
    rng = random.Random(1)
    words = ("<think>", "</think>", "\n", "a", " ", "<", "</think", "é", "ink>")
    for _ in range(1000):
        text, inside = "".join(rng.choices(words, k=7)), rng.random() < 0.5
        whole = split(inside, text)
        assert split(inside, *text) == whole
        for place in range(1, len(text)):
            assert split(inside, text[:place], text[place:]) == whole, (text, place)
