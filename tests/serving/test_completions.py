"""Tests of requests for completions: chat templates, the choice of tokens, and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.conftest import TEMPLATE, Served, post, post_to
from tpcompile.serving.server.options import Options

PROMPT = "Anna is a baker . Felix"
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": PROMPT}],
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
}


@pytest.fixture
def template(served: Served) -> Iterator[None]:
    """Use a chat template with a variable."""
    served.tokenizer.chat_template = "{{ start }}" + TEMPLATE
    yield
    served.tokenizer.chat_template = TEMPLATE


@pytest.mark.usefixtures("template")
def test_variables_of_the_chat_template(served: Served) -> None:
    def prompt_tokens(**more: Any) -> int:
        answer = post(served, "chat/completions", CHAT | more)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    plain = prompt_tokens()
    assert prompt_tokens(chat_template_kwargs={"start": "Anna is "}) == plain + 2
    assert prompt_tokens(chat_template_kwargs={}) == prompt_tokens(chat_template_kwargs=None)


@pytest.mark.usefixtures("template")
def test_the_servers_variables_are_defaults(served: Served) -> None:
    def prompt_tokens(start: str, **more: Any) -> int:
        options = Options("demo", template_options={"start": start})
        answer = post_to(served.engine, options, "/v1/chat/completions", CHAT | more)
        return int(answer.json()["usage"]["prompt_tokens"])

    plain = prompt_tokens("")
    assert prompt_tokens("Anna is ") == plain + 2
    assert prompt_tokens("Anna is ", chat_template_kwargs={"start": "Anna "}) == plain + 1


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "continue_final_message"])
def test_variables_that_clash(served: Served, name: str) -> None:
    answer = post(served, "chat/completions", CHAT | {"chat_template_kwargs": {name: True}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "chat_template_kwargs")
    assert f"got {name!r}" in error["message"]


def first_token(served: Served, **more: Any) -> int:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 1, "ignore_eos": True, **more}
    answer = post(served, "completions", body)
    assert answer.status_code == 200, answer.text
    tokens = served.tokenizer(answer.json()["choices"][0]["text"])["input_ids"]
    return int(tokens[0])


def test_biases_of_tokens(served: Served) -> None:
    best = first_token(served)
    other = served.tokenizer(" cat")["input_ids"][0]
    assert best != other
    assert first_token(served, logit_bias={str(best): -100}) != best
    assert first_token(served, logit_bias={str(other): 100}) == other
    assert first_token(served, logit_bias={}) == best


BAD_BIASES: dict[str, Any] = {
    "logit_bias must be a number from -100 to 100, got 101": {"1": 101},
    "logit_bias must be an object of token ids and numbers": {"a": 1},
    "Tokens of logit_bias must be from 0 to": {"9999999": 1},
}


@pytest.mark.parametrize("message", BAD_BIASES)
def test_bad_biases(served: Served, message: str) -> None:
    answer = post(served, "chat/completions", CHAT | {"logit_bias": BAD_BIASES[message]})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_no_tools(served: Served) -> None:
    """Clients send these where a user has no tools."""
    plain = post(served, "chat/completions", CHAT).json()["choices"]
    for more in ({"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "none"}):
        assert post(served, "chat/completions", CHAT | more).json()["choices"] == plain
