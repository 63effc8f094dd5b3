"""Tests of conversations: the tokens are Hugging Face's, and none is computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tpcompile
from tests.runtime.eager_pair import steps
from tests.runtime.talker import talker
from tpcompile.errors import UsageError
from tpcompile.runtime.conversation import Conversation
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.text import encode_chat

GREEDY = {"do_sample": False, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[CompiledModel, Any, Any]]:
    eager, tokenizer = talker()
    with tpcompile.compile(eager, backend="torch", max_seq_len=96) as model:
        yield model, eager, tokenizer


def _expected(eager: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    ids = torch.tensor([encode_chat(tokenizer, messages)])
    tokens = eager.generate(ids, **GREEDY)[0, ids.shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_answers_are_hugging_faces_and_only_new_tokens_are_computed(
    parts: tuple[CompiledModel, Any, Any],
) -> None:
    model, eager, tokenizer = parts
    talk, pieces = Conversation(model, tokenizer, "be brief"), list[str]()
    for turn, message in enumerate(("Anna is a baker", "The grey cat", "and then")):
        messages = [*talk.messages, {"role": "user", "content": message}]
        held = talk._cache.get_seq_length()
        with steps(model) as ran:
            answer = talk.answer(message, pieces.append, **GREEDY)
        assert answer.text == _expected(eager, tokenizer, messages)
        assert (answer.tokens, answer.room) == (5, 5)
        computed = ran[0].inputs["input_ids"].numel()
        assert computed < len(encode_chat(tokenizer, messages)) - held + 6
        assert turn == 0 or held > 5
    assert "".join(pieces).split() == " ".join(
        entry["content"] for entry in talk.messages if entry["role"] == "assistant"
    ).split()  # fmt: skip


def test_a_template_that_rewrites_earlier_turns(parts: tuple[CompiledModel, Any, Any]) -> None:
    """Only the beginning that is still the same is taken from the cache."""
    model, eager, tokenizer = parts
    talk = Conversation(model, tokenizer)
    talk.answer("Anna is a baker", lambda text: None, **GREEDY)
    talk.messages[1]["content"] = "another answer"
    messages = [*talk.messages, {"role": "user", "content": "The cat"}]
    assert talk.answer("The cat", lambda text: None, **GREEDY).text == _expected(
        eager, tokenizer, messages
    )
    talk.messages[0]["role"] = "nobody"
    messages = [*talk.messages, {"role": "user", "content": "The cat"}]
    assert talk.answer("The cat", lambda text: None, **GREEDY).text == _expected(
        eager, tokenizer, messages
    )


def test_an_answer_can_be_stopped_and_the_conversation_goes_on(
    parts: tuple[CompiledModel, Any, Any],
) -> None:
    model, eager, tokenizer = parts
    talk = Conversation(model, tokenizer)
    assert talk.answer("Anna is", lambda text: None, lambda: True, **GREEDY).tokens == 1
    messages = [*talk.messages, {"role": "user", "content": "The cat"}]
    assert talk.answer("The cat", lambda text: None, **GREEDY).text == _expected(
        eager, tokenizer, messages
    )


def test_reset_keeps_the_systems_message_alone(parts: tuple[CompiledModel, Any, Any]) -> None:
    model, _, tokenizer = parts
    talk = Conversation(model, tokenizer, "be brief")
    first = talk.answer("Anna is", lambda text: None, **GREEDY)
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    assert talk.answer("Anna is", lambda text: None, **GREEDY) == first


def test_refusals_leave_the_conversation_as_it_was(parts: tuple[CompiledModel, Any, Any]) -> None:
    model, _, tokenizer = parts
    talk = Conversation(model, tokenizer)
    talk.answer("Anna is", lambda text: None, **GREEDY)
    before = list(talk.messages)
    with pytest.raises(UsageError, match=r"The conversation is too long\. Found 2"):
        talk.answer("Anna is " * 100, lambda text: None)
    template, tokenizer.chat_template = tokenizer.chat_template, "{{ raise_exception('no') }}"
    try:
        with pytest.raises(UsageError, match=r"template refuses the messages.*TemplateError: no"):
            talk.answer("x", lambda text: None)
    finally:
        tokenizer.chat_template = template
    assert talk.messages == before


def test_the_answer_has_the_room_that_is_left(parts: tuple[CompiledModel, Any, Any]) -> None:
    model, _, tokenizer = parts
    answer = Conversation(model, tokenizer).answer("Anna is", lambda text: None, do_sample=False)
    prompt = encode_chat(tokenizer, [{"role": "user", "content": "Anna is"}])
    assert answer.tokens == answer.room == 96 - len(prompt)
