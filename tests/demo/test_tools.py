"""The demo model with tools calls them, and answers with their results."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import tpcompile
from tests.demo.tools import calls_in, offered
from tpcompile.demo.chats import CITIES, TOOLS, WEATHER, draw_question, samples
from tpcompile.demo.lessons import END, IGNORED, VOCABULARY, chat_batches, tools_tokenizer
from tpcompile.demo.model import make_demo
from tpcompile.demo.text import PEOPLE, all_sentences
from tpcompile.errors import UsageError
from tpcompile.serving import Engine, SamplingParams

pytestmark = pytest.mark.usefixtures("captured_once")

QUESTIONS, RIGHT = 50, 48
CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Rome and Oslo?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Two calls.",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
            for city in ("Rome", "Oslo")
        ],
    },
    {"role": "tool", "content": "hot"},
    {"role": "tool", "content": "cold"},
)
FORM = """\
<|im_start|>system
Be brief.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"name": "get_weather"}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
Weather in Rome and Oslo?<|im_end|>
<|im_start|>assistant
<think>
Two calls.
</think>

I look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Rome"}}
</tool_call>
<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
hot
</tool_response>
<tool_response>
cold
</tool_response><|im_end|>
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tools_tokenizer()


def _text(tokenizer: Any, messages: Any, tools: Any = None, **how: Any) -> str:
    text: str = tokenizer.apply_chat_template(
        [*messages], tools=tools, tokenize=False, add_generation_prompt=True, **how
    )
    return text


def test_the_form_of_qwen3(tokenizer: Any) -> None:
    tools = [{"name": "get_weather"}]
    assert _text(tokenizer, CHAT, tools) == FORM
    short = FORM + "<think>\n\n</think>\n\n"
    assert _text(tokenizer, CHAT, tools, enable_thinking=False) == short
    asked = {"role": "user", "content": "Hi"}
    later = _text(tokenizer, [*CHAT, {"role": "assistant", "content": "Yes."}, asked], tools)
    assert "<think>" not in later and "assistant\nI look.\n<tool_call>" in later
    assert _text(tokenizer, [asked]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    told = {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nHello!"}
    again = tokenizer.apply_chat_template([asked, told], tokenize=False)
    assert again.endswith("assistant\n<think>\nSo.\n</think>\n\nHello!<|im_end|>\n")


def test_arguments_as_text_are_written_as_they_are(tokenizer: Any) -> None:
    call = {"function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    assert '{"name": "add", "arguments": {"a":1}}\n</tool_call>' in _text(tokenizer, messages)


def test_tokens_of_chats(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCABULARY
    assert all(VOCABULARY % tp for tp in range(2, 9))
    marks = "<think>\n</think><tool_call>\n</tool_call><tool_response></tool_response>"
    ids = tokenizer(f"<|im_start|>{marks}<|im_end|>")["input_ids"]
    assert len(ids) == 10
    assert tokenizer.decode(ids, skip_special_tokens=True) == marks
    assert tokenizer.eos_token == END == "<|im_end|>"
    for name in (*CITIES, *(person.name for person in PEOPLE)):  # the same token everywhere
        assert tokenizer.tokenize(f'"{name}')[1:] == tokenizer.tokenize(f" {name}")[1:] == [name]
    for word in (*WEATHER, "08", "42", "7"):
        assert len(tokenizer.tokenize(word)) == 1


def test_only_what_the_model_writes_is_learned(tokenizer: Any) -> None:
    for batch in islice(chat_batches(tokenizer, 1), 20):
        for ids, labels in zip(batch.ids, batch.labels, strict=True):
            learned = labels != IGNORED
            assert torch.equal(ids[learned], labels[learned])
            assert tokenizer.eos_token_id in labels
            text = tokenizer.decode(ids[~learned])
            answers = text.split("<|im_start|>assistant\n")[1:]
            assert all(END not in answer.split("<|im_start|>")[0] for answer in answers), text
            assert "<|im_start|>" not in tokenizer.decode(ids[learned])


def test_samples_are_those_of_a_seed() -> None:
    assert [*islice(samples(1), 5)] == [*islice(samples(1), 5)] != [*islice(samples(2), 5)]


def test_tools_are_learned_by_qwen3(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tools are learned by qwen3 only, got arch='qwen3\.5'"):
        make_demo(tmp_path / "demo", arch="qwen3.5", tools=True)


@dataclass(frozen=True)
class Talker:
    """The trained model in an engine."""

    engine: Engine
    tokenizer: Any

    def answers(self, chats: Any, tools: Any, thinking: bool) -> list[str]:
        """Return the greedy answers to chats, all of which run at once."""
        prompts = [_text(self.tokenizer, chat, tools, enable_thinking=thinking) for chat in chats]
        how = SamplingParams(max_tokens=160)
        handles = [self.engine.add(prompt, how) for prompt in prompts]
        texts = [handle.result()[0].text for handle in handles]
        return [text.rpartition("</think>\n\n")[2] for text in texts]


@pytest.fixture(scope="module")
def talker(tools_demo: Path) -> Iterator[Talker]:
    tokenizer = AutoTokenizer.from_pretrained(tools_demo)
    with (
        tpcompile.compile(str(tools_demo), 2, simulate=True) as model,
        Engine(model, tokenizer=tokenizer, max_batch=16) as engine,
    ):
        yield Talker(engine, tokenizer)


@pytest.mark.parametrize("thinking", [True, False])
def test_questions_get_calls_and_answers(talker: Talker, thinking: bool) -> None:
    draw = random.Random(7)
    asked = [draw_question(draw) for _ in range(QUESTIONS)]
    chats = [[{"role": "user", "content": question.text}] for question in asked]
    texts = talker.answers(chats, offered(), thinking)
    wanted = [[{"name": question.tool, "arguments": question.values}] for question in asked]
    right = [calls_in(text) == calls for text, calls in zip(texts, wanted, strict=True)]
    assert sum(right) >= RIGHT, [t for t, ok in zip(texts, right, strict=True) if not ok]

    expected = []
    for chat, question, calls in zip(chats, asked, wanted, strict=True):
        tool = TOOLS[question.tool]
        facts = question.values | tool.measure(draw, question.values)
        called = {"role": "assistant", "content": "", "tool_calls": [{"function": calls[0]}]}
        chat += [called, {"role": "tool", "content": draw.choice(tool.results).format(**facts)}]
        expected.append(tool.answer.format(**facts))
    texts = talker.answers(chats, offered(), thinking)
    wrong = [(t, e) for t, e in zip(texts, expected, strict=True) if t != e]
    assert len(wrong) <= QUESTIONS - RIGHT, wrong


@pytest.mark.parametrize("thinking", [True, False])
def test_two_questions_get_two_calls(talker: Talker, thinking: bool) -> None:
    asked = "What is the weather in Paris? What time is it in Tokyo?"
    (text,) = talker.answers([[{"role": "user", "content": asked}]], offered(), thinking)
    assert calls_in(text) == [
        {"name": "get_weather", "arguments": {"city": "Paris"}},
        {"name": "get_time", "arguments": {"city": "Tokyo"}},
    ]


PLAIN = {
    "Hello!": "Hello! How can I help you?",
    "Thank you!": "You are welcome.",
    "Who is Anna?": "Anna is a baker who lives in the old mill.",
}


@pytest.mark.parametrize("tools", [None, ("get_weather",), ("add", "get_time")])
def test_small_talk_needs_no_tool(talker: Talker, tools: tuple[str, ...] | None) -> None:
    chats = [[{"role": "user", "content": text}] for text in PLAIN]
    listed = None if tools is None else offered(*tools)
    assert talker.answers(chats, listed, True) == [*PLAIN.values()]


def test_without_the_tool_it_says_so(talker: Talker) -> None:
    chat = [{"role": "user", "content": "What is the weather in Paris?"}]
    for tools in (None, offered("add")):
        assert talker.answers([chat], tools, False) == ["I have no tool for the weather."]


def test_stories_are_sentences_of_the_grammar(talker: Talker) -> None:
    how = SamplingParams(max_tokens=40)
    text = talker.engine.add("Anna is", how).result()[0].text
    said = [f"{part}." for part in f"Anna is{text}".split(".")[:-1]]
    assert {part.strip() for part in said} <= set(all_sentences())
