"""Tokenizers of GGUF files are those of the models that the files were made from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen3_5Tokenizer,
)
from transformers.integrations import ggml

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
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As in the tokenizer.json of Llama 3."""
MARKS = "\u0915\u094d\u0937"
"""Two letters of Devanagari, and a mark after the first one."""
BYTEWISE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {Qwen2Tokenizer: "qwen2", Qwen3_5Tokenizer: "qwen35"}
"""How classes split texts, by the names of llama.cpp."""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def of_qwen(make: Any) -> Any:
    """Return a tokenizer of a class of Qwen with the pairs of the demo model.

    One more pair is merged only within a word with its marks.
    """
    state = demo_tokenizer().backend_tokenizer
    model = json.loads(state.to_str())["model"]
    (octets, _), *_ = BYTEWISE.pre_tokenize_str(MARKS)
    pair = octets[2], octets[3]
    vocabulary = {**model["vocab"], "".join(pair): len(model["vocab"])}
    merges = [*(tuple(merge) for merge in model["merges"]), pair]
    tokenizer = make(vocabulary, merges, eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def original() -> Any:
    return of_qwen(Qwen2Tokenizer)


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
        "tokenizer.ggml.pre": SPLITS[type(tokenizer)],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*types, 5, 5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
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


@pytest.mark.parametrize("make", SPLITS)
def test_the_same_ids(make: Any, tmp_path: Path) -> None:
    original = of_qwen(make)
    tokenizer = tokenizer_of(written(tmp_path, original))
    for text in (*TEXTS, MARKS):
        ids = original(text)["input_ids"]
        assert tokenizer(text)["input_ids"] == ids
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == original.decode(
                ids, skip_special_tokens=skip
            )
    messages = [{"role": "user", "content": "Hello"}]
    assert encode_chat(tokenizer, messages) == encode_chat(original, messages)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.get_vocab() == original.get_vocab()


def test_marks_are_parts_of_words(tmp_path: Path) -> None:
    """The tokenizer of Qwen3.5 merges letters and their marks, and that of Qwen2 does not."""
    counts = []
    for make in SPLITS:
        (tmp_path / make.__name__).mkdir()
        tokenizer = tokenizer_of(written(tmp_path / make.__name__, of_qwen(make)))
        counts.append(len(tokenizer(MARKS)["input_ids"]))
    assert counts == [9, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "bert"}, r"tokenizer\.ggml\.pre='bert'.*'qwen2'"),
        ({"tokenizer.ggml.pre": ["qwen2"]}, r"tokenizer\.ggml\.pre=\['qwen2'\].*'qwen2'"),
        (
            {"tokenizer.ggml.add_bos_token": True},
            "begin or end with a token that the file does not",
        ),
        ({"tokenizer.ggml.add_eos_token": 1}, "add_eos_token=1, not true or false"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "a merge that does not have two tokens"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "tokenizer of a GGUF file is not valid"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges that are not texts"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "different numbers of types and tokens"),
        ({"tokenizer.ggml.padding_token_id": 10**6}, "padding_token_id=1000000, of "),
    ],
)
def test_tokenizers_that_are_refused(
    original: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, original, **changes)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        tokenizer_of(path)


BYTES = [f"<0x{number:02X}>" for number in range(256)]


def trained(make: Any, first: list[str], **parts: Any) -> tuple[dict[str, int], Any]:
    """Return the vocabulary and the merges of a few texts; its first tokens are given."""
    tokenizer = Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(TEXTS * 20, make(vocab_size=420, special_tokens=first))
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


@pytest.fixture(scope="module")
def sentencepiece() -> tuple[Any, dict[str, Any]]:
    """Return a tokenizer of Llama 2's class, and what a file says of it: scores, not merges."""
    first = ["<unk>", "<s>", "</s>", *BYTES, "<tool>"]
    words = pre_tokenizers.Metaspace()
    vocabulary, merges = trained(trainers.BpeTrainer, first, pre_tokenizer=words)
    make: Any = LlamaTokenizer
    tokenizer = make(vocabulary, merges, add_bos_token=True)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    places = {"".join(pair): -float(place) for place, pair in reversed([*enumerate(merges)])}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [2, 3, 3, *(6 for _ in BYTES), 4]
    return tokenizer, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [places.get(token, -1000.0) for token in tokens],
        "tokenizer.ggml.token_type": types + [1] * (len(tokens) - len(types)),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.fixture(scope="module")
def bytewise() -> tuple[Any, dict[str, Any]]:
    """Return a tokenizer as that of Llama 3, and what a file says of it."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = partial(
        trainers.BpeTrainer, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    first = ["<|begin_of_text|>", "<|eot_id|>", *CONTROL]
    vocabulary, merges = trained(trainer, first, pre_tokenizer=split)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, bos_token=first[0], eos_token=first[1])
    tokenizer.add_bos_token = True
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in first])
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return tokenizer, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(first) + [1] * (len(tokens) - len(first)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }


def llama(path: Path, more: dict[str, Any]) -> str:
    size = len(more["tokenizer.ggml.tokens"])
    write_gguf(path / "model.gguf", model_of("tiny-llama", vocab_size=size), more=more)
    return str(path / "model.gguf")


@pytest.mark.parametrize("kind", ["sentencepiece", "bytewise"])
def test_llama(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Ids are those of the original, and of transformers if the file tells that texts begin."""
    original, more = request.getfixturevalue(kind)
    tokenizer = tokenizer_of(llama(tmp_path, more))
    (tmp_path / "told").mkdir()
    llama(tmp_path / "told", {**more, "tokenizer.ggml.add_bos_token": True})
    references, load = [original], AutoTokenizer.from_pretrained
    if not hasattr(ggml, "GGUFLlamaConverter"):  # which adds no first token
        references.append(load(tmp_path / "told", gguf_file="model.gguf"))
    for text in [*TEXTS, "  two spaces", "numbers 1234567, don't", "</s><s> x"]:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == original.bos_token_id
        for reference in references:
            assert reference(text)["input_ids"] == ids, text
            for skip in (False, True):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
                    ids, skip_special_tokens=skip
                )
    assert tokenizer.get_vocab() == original.get_vocab()
    assert (tokenizer.bos_token, tokenizer.eos_token) == (original.bos_token, original.eos_token)
    messages = [{"role": "user", "content": "Hello"}]
    original.chat_template = TEMPLATE
    assert encode_chat(tokenizer, messages) == encode_chat(original, messages)


def test_words_that_are_tokens_need_no_merges(bytewise: Any, tmp_path: Path) -> None:
    """Some tokens of Llama 3 come of no merges; llama.cpp finds them too."""
    _, more = bytewise
    tokens = [*more["tokenizer.ggml.tokens"], "zyx"]
    types = [*more["tokenizer.ggml.token_type"], 1]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = tokenizer_of(llama(tmp_path, {**more, **changes}))
    assert tokenizer("zyx")["input_ids"] == [0, len(tokens) - 1]


@pytest.mark.parametrize(
    ("changes", "text", "ids"),
    [
        ({"add_bos_token": False}, "small", ["\u2581small"]),
        ({"add_eos_token": True}, "small", ["<s>", "\u2581small", "</s>"]),
        ({"add_space_prefix": False}, "\tnow", ["<s>", "\tn", "ow"]),
    ],
)
def test_flags(
    sentencepiece: Any, tmp_path: Path, changes: dict[str, Any], text: str, ids: list[str]
) -> None:
    _, more = sentencepiece
    metadata = {f"tokenizer.ggml.{word}": value for word, value in changes.items()}
    tokenizer = tokenizer_of(llama(tmp_path, {**more, **metadata}))
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [1.0]}, "different numbers of scores and tokens"),
        ({"scores": "none"}, "different numbers of scores and tokens"),
        ({"merges": ["a b c"]}, "a merge that does not have two tokens"),
        ({"bos_token_id": 10**6}, "bos_token_id=1000000, of "),
        ({"add_space_prefix": "yes"}, "add_space_prefix='yes', not true or false"),
    ],
)
def test_tokenizers_of_llama_that_are_refused(
    sentencepiece: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    _, more = sentencepiece
    metadata = {f"tokenizer.ggml.{word}": value for word, value in changes.items()}
    path = llama(tmp_path, {**more, **metadata})
    with pytest.raises(CheckpointError, match=message):
        tokenizer_of(path)
