"""Messages of assistants, as a whole and in pieces."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.serving.chats.texts import BEGIN, END, TOOLS, hermes, random_text
from tpcompile.serving.chats.assistant import Assistant, Message
from tpcompile.serving.chats.calls import MarkedCalls
from tpcompile.serving.chats.hermes import JsonCall
from tpcompile.serving.chats.thinking import Thinking

CALL = BEGIN + '{"name": "f", "arguments": {"a": 1}}' + END


def assistant(parallel: bool = True) -> Assistant:
    return Assistant(Thinking(), MarkedCalls(partial(JsonCall, TOOLS), BEGIN, END), parallel)


def joined(reader: Assistant, pieces: list[str]) -> Message:
    """Return the message that pieces join to, as a client joins them."""
    message = Message()
    for place, text in enumerate(pieces):
        piece = reader.push(text, place == len(pieces) - 1)
        message.reasoning += piece.reasoning
        message.content += piece.content
        for call in piece.calls:
            assert bool(call.id) == bool(call.name) == (call.index == len(message.calls))
            assert call.id or call.arguments, "an empty piece"
            if call.id:
                message.calls.append(call)
            else:
                message.calls[call.index].arguments += call.arguments
    return message


def test_pieces_join_to_the_whole_message() -> None:
    """They do unless a call has begun and then failed."""
    rng = random.Random(3)
    same = 0
    for _ in range(1000):
        text = rng.choice(("", "<think>\na\n</think>\n\n")) + random_text(rng, hermes)
        reader = assistant()
        message = joined(reader, [*text, ""])
        if not reader.failed:
            assert message == reader.message
            same += 1
        assert message.reasoning == reader.message.reasoning
        assert len(message.calls) >= len(reader.message.calls)
    assert 300 < same < 900


def test_a_broken_call_keeps_its_place_in_a_stream() -> None:
    broken = BEGIN + '{"name": "f", "arguments": {"a": 1}<' + END
    reader = assistant()
    message = joined(reader, [*("a\n" + broken + CALL), ""])
    assert [call.arguments for call in message.calls] == ['{"a": 1}'] * 2
    assert [call.index for call in message.calls] == [0, 1]
    assert message.content == "a<" + END
    assert reader.message.content == "a\n" + broken and len(reader.message.calls) == 1
    assert reader.failed == 1


def test_without_parallel_calls_a_message_ends_with_the_first() -> None:
    reader = assistant(parallel=False)
    message = joined(reader, [f"a{CALL}{CALL}b", "c"])
    assert (message.content, len(message.calls), reader.ended) == ("a", 1, True)
    assert message == reader.message
    assert not reader.push(CALL)


CUT_OFF = {
    "<thin": Message(content="<thin"),
    "<think>": Message(),
    "<think>\nHm.\n</th": Message("Hm.\n</th"),
    "<think>Hm.</think>\n": Message("Hm."),
    "<think>Hm.</think>\n\na <tool": Message("Hm.", "a <tool"),
    f"<think>Hm.</think>{CALL[:-20]}": Message("Hm.", CALL[:-20]),
}


@pytest.mark.parametrize("text", CUT_OFF)
def test_a_text_that_is_cut_off(text: str) -> None:
    reader = assistant()
    joined(reader, [*text[:-1], text[-1]])
    assert reader.message == CUT_OFF[text]
    assert reader.thinks == (not reader.message.content and "</think>" not in text)
