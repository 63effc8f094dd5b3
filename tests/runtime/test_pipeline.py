"""A compiled model works in `transformers.pipeline("text-generation")`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TextStreamer, pipeline

import tpcompile
from tests.runtime.eager_pair import Both, listening, lively
from tpcompile.demo.model import demo_tokenizer

TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}. {% endfor %}"


@pytest.fixture(scope="module")
def pair() -> Both:
    tokens = demo_tokenizer()
    settings = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    eager = lively("tiny-qwen3", vocab_size=len(tokens), bos_token_id=None, **settings)
    return Both(eager, tpcompile.compile(eager, tp=2, simulate=True))


def _answers(pair: Both, prompts: Any, **options: Any) -> list[Any]:
    """Return both pipelines' answers; the compiled model may log only what eager logs."""
    answers, messages = [], []
    for model in pair.each():
        tokenizer = demo_tokenizer()
        tokenizer.chat_template = TEMPLATE
        with listening() as heard:
            generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
            torch.manual_seed(2)
            answers.append(generate(prompts, max_new_tokens=6, **options))
        messages.append(heard)
    assert set(messages[1]) <= set(messages[0])
    return answers


TEXTS = ["Anna is a", "One rainy morning Felix and his", "The"]

ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": (TEXTS[0], {"do_sample": False}),
    "defaults": (TEXTS[0], {}),
    "beams": (TEXTS[0], {"num_beams": 3, "num_return_sequences": 2}),
    "one by one": (TEXTS, {"do_sample": False}),
    "a padded batch": (TEXTS, {"do_sample": False, "batch_size": 2}),
    "a sampled batch": (TEXTS, {"do_sample": True, "batch_size": 3}),
    "new text only": (TEXTS[1], {"return_full_text": False}),
    "chat": ([{"role": "user", "content": "Who is Anna"}], {"do_sample": False}),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_text_is_that_of_eager(pair: Both, name: str) -> None:
    prompts, options = ASKED[name]
    expected, actual = _answers(pair, prompts, **options)
    assert actual == expected


def test_a_padded_batch_gives_the_text_of_each_alone(pair: Both) -> None:
    together = _answers(pair, TEXTS, do_sample=False, batch_size=3)[1]
    assert together == _answers(pair, TEXTS, do_sample=False)[1]


def test_text_is_streamed(pair: Both, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for model in pair.each():
        tokenizer = demo_tokenizer()
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
        generate(TEXTS[0], max_new_tokens=6, do_sample=False, streamer=TextStreamer(tokenizer))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[1].startswith(TEXTS[0])


def test_the_pipeline_shows_itself(pair: Both) -> None:
    shown = [
        repr(pipeline("text-generation", model=model, tokenizer=demo_tokenizer(), device="cpu"))
        for model in pair.each()
    ]
    assert "Qwen3ForCausalLM" in shown[1] and "cpu" in shown[1]
