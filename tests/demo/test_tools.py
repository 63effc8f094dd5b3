"""The trained demo model with tools calls them where a question needs it, and then answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import tpcompile
from tpcompile.demo.chats import Chat, chats
from tpcompile.demo.lessons import END
from tpcompile.demo.model import make_demo
from tpcompile.errors import UsageError
from tpcompile.serving import Engine, SamplingParams

pytestmark = pytest.mark.usefixtures("captured_once")

CHATS = 60
ENOUGH = {"call": 0.9, "answer": 0.9, "talk": 0.9, "refusal": 0.5}
"""The least share of right texts by kind. Some calls of absent tools are not refused."""


@pytest.fixture(scope="module")
def tokenizer(tools_demo: Path) -> Any:
    return AutoTokenizer.from_pretrained(tools_demo)


@pytest.fixture(scope="module")
def engine(tools_demo: Path, tokenizer: Any) -> Iterator[Engine]:
    with (
        tpcompile.compile(str(tools_demo), 2, simulate=True) as model,
        Engine(model, tokenizer=tokenizer, max_batch=16) as engine,
    ):
        yield engine


def _turns(tokenizer: Any, chat: Chat) -> Iterator[tuple[str, str, str]]:
    """Yield each turn of the assistant: its kind, its prompt and its text."""
    for place, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            prompt, text = (
                tokenizer.apply_chat_template(
                    chat.messages[:end],
                    tools=chat.tools,
                    tokenize=False,
                    add_generation_prompt=opened,
                )
                for end, opened in ((place, True), (place + 1, False))
            )
            kind = _kind(message, chat.messages[place - 1])
            yield kind, prompt, text.removeprefix(prompt).removesuffix(f"{END}\n")


def _kind(message: dict[str, Any], before: dict[str, Any]) -> str:
    if "tool_calls" in message:
        return "call"
    if before["role"] == "tool":
        return "answer"
    return "refusal" if message["content"].startswith("I have no tool") else "talk"


def test_questions_that_training_left_out(engine: Engine, tokenizer: Any) -> None:
    """Calls have the right tool and arguments; answers tell the result; small talk has no call."""
    turns = [
        turn for chat in islice(chats(5, held_out=True), CHATS) for turn in _turns(tokenizer, chat)
    ]
    handles = [engine.add(prompt, SamplingParams(max_tokens=60)) for _, prompt, _ in turns]
    right, wrong = defaultdict(list), []
    for (kind, _, expected), handle in zip(turns, handles, strict=True):
        text = handle.result()[0].text
        right[kind].append(text == expected)
        wrong += [] if text == expected else [(expected, text)]
    assert set(right) == set(ENOUGH)
    for kind, flags in right.items():
        assert sum(flags) >= ENOUGH[kind] * len(flags), (kind, wrong)


def test_tools_need_qwen3(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tools need the arch 'qwen3', got 'qwen3\.5'"):
        make_demo(tmp_path / "demo", arch="qwen3.5", tools=True)
