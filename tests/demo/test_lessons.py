"""Lessons: the form of chats, its tokens, what of them is learned, and weights that copy."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tpcompile.demo.chats import CITIES, SKIES
from tpcompile.demo.lessons import (
    COPIES,
    END,
    IGNORED,
    MARKS,
    TEMPLATE,
    VOCABULARY,
    chat_batches,
    chat_tokenizer,
    prepare_to_copy,
)
from tpcompile.demo.model import demo_config
from tpcompile.serving.chats.forms import TOOL_FORMS, form_of

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add 1 and 2."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "The sum is 3."},
]
FORM = """\
<|im_start|>system
add(a, b)
now()
<|im_end|>
<|im_start|>system
Be brief.<|im_end|>
<|im_start|>user
Add 1 and 2.<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
3
</tool_response><|im_end|>
<|im_start|>assistant
The sum is 3.<|im_end|>
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer()


def test_the_form_of_a_chat(tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}
    functions = ({"name": "add", "parameters": schema}, {"name": "now"})
    tools = [{"type": "function", "function": function} for function in functions]
    assert tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False) == FORM
    prompt = tokenizer.apply_chat_template(CHAT[1:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n<|im_start|>assistant\n"
    assert form_of("auto", TEMPLATE) is TOOL_FORMS["hermes"]


def test_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCABULARY
    assert all(VOCABULARY % tp for tp in range(2, 9))
    ids = tokenizer("".join(MARKS) + END)["input_ids"]
    assert len(ids) == len(MARKS) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(MARKS)
    assert tokenizer.eos_token == END
    for name in (*CITIES, *SKIES, "7", "42", "198"):  # the same token in a question and in a call
        assert (
            tokenizer.tokenize(f' "{name}"')[1:-1] == tokenizer.tokenize(f" {name}")[1:] == [name]
        )
    text = "Zoë's 3 naïve\n\tcafés… 漢字 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_only_what_the_assistant_writes_is_learned(tokenizer: Any) -> None:
    for ids, labels in islice(chat_batches(tokenizer, 1), 3):
        learned = labels != IGNORED
        assert torch.equal(ids[learned], labels[learned])
        for row, chosen in zip(ids, learned, strict=True):
            text, learned_text = tokenizer.decode(row), tokenizer.decode(row[chosen])
            parts = [part.partition(END)[0] for part in text.split("<|im_start|>assistant\n")[1:]]
            assert learned_text == "".join(part + END for part in parts) != ""


def test_heads_pass_on_the_tokens_that_they_attend_to(tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_config(demo_config(tokenizer))
    prepare_to_copy(model)
    attention = model.model.layers[1].self_attn
    width, group = attention.head_dim, attention.num_key_value_groups
    for head in range(model.config.num_attention_heads):
        values = attention.v_proj.weight[head // group * width :][:width]
        passed_on = attention.o_proj.weight[:, head * width :][:, :width] @ values
        eigenvalues = torch.linalg.eigvalsh(passed_on)
        assert torch.allclose(eigenvalues[-width:], torch.tensor(COPIES))
        assert torch.allclose(eigenvalues[:-width], torch.tensor(0.0), atol=1e-6)
