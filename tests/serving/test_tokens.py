"""Tests of /tokenize and /detokenize, whose bodies are vLLM's."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serving.conftest import KEY, Served, post

TEXT = "Anna is a baker"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}]}


def ask(served: Served, path: str, body: Any, key: str = KEY) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{served.url}/{path}", json=body, headers=headers)


def test_a_text_and_its_tokens(served: Served) -> None:
    ids = served.tokenizer(TEXT)["input_ids"]
    answer = ask(served, "tokenize", {"model": "demo", "prompt": TEXT}).json()
    assert answer == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None}
    with_texts = ask(served, "tokenize", {"prompt": TEXT, "return_token_strs": True}).json()
    assert with_texts["token_strs"] == served.tokenizer.convert_ids_to_tokens(ids)
    assert ask(served, "detokenize", {"tokens": ids}).json() == {"prompt": TEXT}
    assert ask(served, "tokenize", {"prompt": ""}).json()["tokens"] == []


def test_messages_by_the_chat_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{{ start }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        "{{ messages[0]['content'] }}{% if add_generation_prompt %} Felix{% endif %}"
    )
    monkeypatch.setattr(served.tokenizer, "chat_template", template)

    def text_of(**more: Any) -> str:
        tokens = ask(served, "tokenize", CHAT | more).json()["tokens"]
        return str(served.tokenizer.decode(tokens))

    assert text_of() == f"{TEXT} Felix"
    assert text_of(add_generation_prompt=False) == TEXT
    assert text_of(chat_template_kwargs={"start": "The cat "}) == f"The cat {TEXT} Felix"
    tools = [{"type": "function", "function": {"name": name}} for name in ("cat", "baker")]
    assert text_of(tools=tools) == f"cat baker {TEXT} Felix"
    assert text_of(tools=[]) == text_of(tools=None) == text_of()
    prompt = post(served, "chat/completions", CHAT | {"tools": tools, "max_tokens": 1}).json()
    count = ask(served, "tokenize", CHAT | {"tools": tools}).json()["count"]
    assert prompt["usage"]["prompt_tokens"] == count


BAD: dict[str, tuple[str, Any, int, str]] = {
    "no text": ("tokenize", {}, 400, "prompt is missing"),
    "a list": ("tokenize", {"prompt": [1]}, 400, "prompt must be a text"),
    "unknown": ("tokenize", {"prompt": "a", "n": 1}, 400, "'n' is not supported"),
    "both": ("tokenize", {"prompt": "a", **CHAT}, 400, "'prompt' is not supported"),
    "clash": ("tokenize", {**CHAT, "chat_template_kwargs": {"tokenize": 1}}, 400, "'tokenize'"),
    "tools": ("tokenize", {**CHAT, "tools": [{}]}, 400, "tools[0] must be"),
    "tools of a text": ("tokenize", {"prompt": "a", "tools": []}, 400, "'tools' is not supported"),
    "open end": ("tokenize", {**CHAT, "continue_final_message": True}, 400, "must be false"),
    "model": ("tokenize", {"prompt": "a", "model": "other"}, 404, "There is no model 'other'"),
    "no tokens": ("detokenize", {}, 400, "tokens is missing"),
    "texts": ("detokenize", {"tokens": ["a"]}, 400, "tokens must be a list of integers"),
    "negative": ("detokenize", {"tokens": [-1]}, 400, "tokens must be from 0 to"),
    "huge": ("detokenize", {"tokens": [10**30]}, 400, "tokens must be from 0 to"),
    "another model": ("detokenize", {"tokens": [1], "model": "x"}, 404, "There is no model 'x'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies(served: Served, name: str) -> None:
    path, body, status, message = BAD[name]
    answer = ask(served, path, body)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True)


@pytest.mark.parametrize("path", ["tokenize", "detokenize"])
def test_they_need_the_key(served: Served, path: str) -> None:
    assert ask(served, path, {}, "another").status_code == 401


def test_without_a_tokenizer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine, "tokenizer", None)
    answer = ask(served, "tokenize", {"prompt": "a"})
    assert answer.status_code == 400 and "has no tokenizer" in answer.text
