"""Tokenizers of GGUF files are those of the models that the files were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from tests.gguf_files import model_of, write_gguf
from tpcompile.demo.model import demo_tokenizer
from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.runtime.text import encode_chat, tokenizer_of

TEXTS = [
    "The small cat sat on 12345 mats.\n\n  It's   fine\tnow!",
    "ünïcode e\u0301 日本語 🙂 <|im_end|> mid <tool> end<|endoftext|>",
    "",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def original() -> Any:
    """Return a tokenizer of Qwen's class with the pairs of the demo model."""
    state = demo_tokenizer().backend_tokenizer
    model = json.loads(state.to_str())["model"]
    make: Any = Qwen2Tokenizer
    found = make(model["vocab"], [tuple(one) for one in model["merges"]], eos_token="<|im_end|>")
    found.add_tokens([AddedToken(one, special=True, normalized=False) for one in CONTROL])
    found.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    found.chat_template = TEMPLATE
    return found


def properties(tokenizer: Any) -> dict[str, Any]:
    """Return the properties of a file that describe a tokenizer, as llama.cpp's scripts do."""
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    tokens, types = [], []
    added = tokenizer.added_tokens_decoder
    for number, token in sorted((n, t) for t, n in tokenizer.get_vocab().items()):
        tokens.append(token)
        types.append(1 if number not in added else 3 if added[number].special else 4)
    tokens += [f"[PAD{len(tokens)}]", f"[PAD{len(tokens) + 1}]"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*types, 5, 5],
        "tokenizer.ggml.merges": [" ".join(one) for one in merges],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def written(path: Path, original: Any, **changes: Any) -> str:
    more = {**properties(original), **changes}
    model = model_of(intermediate_size=64, vocab_size=len(more["tokenizer.ggml.tokens"]))
    write_gguf(path / "model.gguf", model, more=more)
    return str(path / "model.gguf")


def test_the_same_ids(original: Any, tmp_path: Path) -> None:
    found = tokenizer_of(written(tmp_path, original))
    for text in TEXTS:
        ids = original(text)["input_ids"]
        assert found(text)["input_ids"] == ids
        for skip in (False, True):
            assert found.decode(ids, skip_special_tokens=skip) == original.decode(
                ids, skip_special_tokens=skip
            )
    messages = [{"role": "user", "content": "Hello"}]
    assert encode_chat(found, messages) == encode_chat(original, messages)
    assert found.eos_token == "<|im_end|>" and found.pad_token == "<|endoftext|>"
    assert found.get_vocab() == original.get_vocab()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, r"tokenizer\.ggml\.pre='llama-bpe'.*'qwen2'"),
        ({"tokenizer.ggml.add_bos_token": True}, "begin every text with a token"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges of other than two tokens"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "tokenizer of a GGUF file is not valid"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges that are not texts"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "other numbers of types"),
        ({"tokenizer.ggml.padding_token_id": 10**6}, "padding_token_id=1000000, of "),
    ],
)
def test_tokenizers_that_are_refused(
    original: Any, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = written(tmp_path, original, **changes)
    with pytest.raises((CheckpointError, UnsupportedError), match=said):
        tokenizer_of(path)
