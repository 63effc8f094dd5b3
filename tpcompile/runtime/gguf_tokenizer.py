"""Tokenizers of the models in GGUF files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer, Qwen3_5Tokenizer
from transformers.tokenization_utils_base import generate_merges

from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.gguf import GgufFile, open_gguf
from tpcompile.json_files import shortened

WITHOUT_TOKENIZER = "Pass token ids to tpcompile generate: --prompt-ids 1,2,3"
"""A hint where a model has no tokenizer that can be read."""
_KEY = "tokenizer.ggml."
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern by which Llama 3 splits text before pairs are merged."""


class _Type(IntEnum):
    """The types of tokens, by the numbers of the format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Maker:
    """A recipe for a tokenizer from a file."""

    make: Callable[[GgufFile, dict[str, int], dict[str, str | None]], Any]
    """A function of a file, its vocabulary, and its special tokens by transformers' names."""
    begins: bool
    """Whether texts begin with a token if the file does not specify it; llama.cpp's default."""


def gguf_tokenizer(path: str) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template."""
    file = open_gguf(path)
    maker = _maker(file)
    tokens = _texts(file, "tokens")
    types = file.metadata.get(f"{_KEY}token_type", [_Type.NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise _invalid(file, "different numbers of types and tokens")
    vocabulary = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _Type.UNUSED
    }
    special = {f"{name}_token": _token(file, tokens, word) for name, word in _SPECIAL.items()}
    begins, ends = _flag(file, "add_bos_token", maker.begins), _flag(file, "add_eos_token", False)
    if (begins and special["bos_token"] is None) or (ends and special["eos_token"] is None):
        raise _invalid(file, "texts that begin or end with a token that the file does not name")
    try:
        tokenizer = maker.make(file, vocabulary, special)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain exceptions
        raise _invalid(file, str(error)) from error
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _Type.CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_Type.CONTROL, _Type.USER_DEFINED)
        ]
    )
    if begins or ends:
        tokenizer.add_bos_token, tokenizer.add_eos_token = begins, ends
    template = file.metadata.get("tokenizer.chat_template")
    tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def _maker(file: GgufFile) -> _Maker:
    model, split = file.metadata.get(f"{_KEY}model"), file.metadata.get(f"{_KEY}pre", "default")
    maker = next((candidate for kind, candidate in _MAKERS.items() if kind == (model, split)), None)
    if maker is None:
        raise UnsupportedError(
            "tpcompile does not read GGUF tokenizers of this kind",
            where=str(file.path),
            got=f"{_KEY}model={shortened(repr(model))}, {_KEY}pre={shortened(repr(split))}",
            expected=" or ".join(f"{model!r} and {split!r}" for model, split in _MAKERS),
            hint=WITHOUT_TOKENIZER,
        )
    return maker


def _qwen(
    file: GgufFile, vocabulary: dict[str, int], special: dict[str, str | None], make: Any
) -> Any:
    return make(vocabulary, _merges(file), **special)


def _llama3(file: GgufFile, vocabulary: dict[str, int], special: dict[str, str | None]) -> Any:
    """Make a tokenizer of bytes. A part of a text that is itself a token is not merged."""
    bytewise = Tokenizer(BPE(vocab=vocabulary, merges=_merges(file), ignore_merges=True))
    bytewise.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bytewise.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=bytewise, clean_up_tokenization_spaces=False, **special)


def _sentencepiece(
    file: GgufFile, vocabulary: dict[str, int], special: dict[str, str | None]
) -> Any:
    """Make a tokenizer of characters. Tokens with better scores are merged first."""
    if f"{_KEY}merges" in file.metadata:
        merges = _merges(file)
    else:
        scores = dict(zip(_texts(file, "tokens"), _scores(file), strict=True))
        merges = generate_merges(vocabulary, {token: scores[token] for token in vocabulary})
    make: Any = LlamaTokenizer
    spaced = _flag(file, "add_space_prefix", True)
    return make(vocabulary, merges, add_prefix_space=spaced, **special)


_SPECIAL = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}
"""The words of special tokens in files, by those in transformers."""
_BYTES_OF_LLAMA = _Maker(_llama3, begins=True)
_MAKERS = {
    ("gpt2", "qwen2"): _Maker(partial(_qwen, make=Qwen2Tokenizer), begins=False),
    ("gpt2", "qwen35"): _Maker(partial(_qwen, make=Qwen3_5Tokenizer), begins=False),
    ("gpt2", "llama-bpe"): _BYTES_OF_LLAMA,
    ("gpt2", "llama3"): _BYTES_OF_LLAMA,
    ("gpt2", "llama-v3"): _BYTES_OF_LLAMA,
    ("llama", "default"): _Maker(_sentencepiece, begins=True),
}
"""The makers by the model of a tokenizer, and by how it splits text first."""


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    merges = [merge.split(" ") for merge in _texts(file, "merges")]
    if any(len(parts) != 2 for parts in merges):
        raise _invalid(file, "a merge that does not have two tokens")
    return [(first, second) for first, second in merges]


def _scores(file: GgufFile) -> list[float]:
    scores, count = file.metadata.get(f"{_KEY}scores"), len(_texts(file, "tokens"))
    if not isinstance(scores, list) or len(scores) != count:
        raise _invalid(file, "different numbers of scores and tokens")
    if not all(type(score) is float and math.isfinite(score) for score in scores):
        raise _invalid(file, "scores that are not numbers")
    return scores


def _flag(file: GgufFile, word: str, default: bool) -> bool:
    flag = file.metadata.get(_KEY + word, default)
    if not isinstance(flag, bool):
        raise _invalid(file, f"{word}={flag!r}, not true or false")
    return flag


def _texts(file: GgufFile, word: str) -> list[str]:
    texts = file.metadata.get(_KEY + word)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _invalid(file, f"{word} that are not texts")
    return texts


def _token(file: GgufFile, tokens: list[str], word: str) -> str | None:
    number = file.metadata.get(f"{_KEY}{word}_token_id")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise _invalid(file, f"{word}_token_id={number!r}, of {len(tokens)} tokens")
    return tokens[number]


def _invalid(file: GgufFile, got: str) -> CheckpointError:
    return CheckpointError(
        "The tokenizer of a GGUF file is not valid",
        where=str(file.path),
        got=shortened(got),
        hint="It may be damaged: download it again",
    )
