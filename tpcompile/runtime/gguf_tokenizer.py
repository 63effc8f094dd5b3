"""Tokenizers of the models in GGUF files."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.gguf import GgufFile, open_gguf
from tpcompile.json_files import shortened

_KEY = "tokenizer.ggml."
_CLASSES = {("gpt2", "qwen2"): Qwen2Tokenizer}
"""The classes of transformers by the model of a tokenizer, and by how it splits text first."""


class _Type(IntEnum):
    """The types of tokens, by the numbers of the format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def gguf_tokenizer(path: str) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template."""
    file = open_gguf(path)
    kind = file.metadata.get(f"{_KEY}model"), file.metadata.get(f"{_KEY}pre")
    if kind not in _CLASSES:
        raise UnsupportedError(
            "tpcompile does not read GGUF tokenizers of this kind",
            where=path,
            got=f"{_KEY}model={shortened(repr(kind[0]))}, {_KEY}pre={shortened(repr(kind[1]))}",
            expected=" or ".join(f"{model!r} and {pre!r}" for model, pre in _CLASSES),
            hint="Pass the prompt as token ids: --prompt-ids 1,2,3",
        )
    if file.metadata.get(f"{_KEY}add_bos_token"):
        raise UnsupportedError(
            "tpcompile does not read GGUF tokenizers that begin every text with a token",
            where=path,
            got=f"{_KEY}add_bos_token=True",
        )
    tokens, merges = _texts(file, "tokens"), _texts(file, "merges")
    types = file.metadata.get(f"{_KEY}token_type", [_Type.NORMAL] * len(tokens))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if not isinstance(types, list) or len(types) != len(tokens) or any(len(p) != 2 for p in pairs):
        raise _invalid(file, "merges of other than two tokens, or other numbers of types")
    vocabulary = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _Type.UNUSED
    }
    eos, pad = (_token(file, tokens, word) for word in ("eos", "padding"))
    try:
        make: Any = _CLASSES[kind]
        found = make(
            vocabulary, pairs, unk_token=None, bos_token=None, eos_token=eos, pad_token=pad
        )
    except Exception as error:  # the library raises plain exceptions
        raise _invalid(file, str(error)) from error
    found.add_tokens(
        [
            AddedToken(token, special=kind == _Type.CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_Type.CONTROL, _Type.USER_DEFINED)
        ]
    )
    template = file.metadata.get("tokenizer.chat_template")
    found.chat_template = template if isinstance(template, str) else None
    return found


def _texts(file: GgufFile, word: str) -> list[str]:
    found = file.metadata.get(_KEY + word)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise _invalid(file, f"{word} that are not texts")
    return found


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
