"""The metadata of GGUF files: the properties of a model, each checked where it is read."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from typing import Any

from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.gguf.file import GgufFile, GgufTensor
from tpcompile.gguf.kinds import GgufKind
from tpcompile.json_files import shortened

HEADS, KV_HEADS = "attention.head_count", "attention.head_count_kv"
BLOCKS, PREDICTED = "block_count", "nextn_predict_layers"
ROTATED, FEATURES = "rope.dimension_count", "feed_forward_length"
_AS_MANY_AS = {KV_HEADS: HEADS}
"""Counts that a file may leave out if they equal another one."""
ROTARY_FACTORS = "rope_freqs.weight"
"""The tensor of divisors of the frequencies of rotary tables."""
_ENDS = ("eos", "eot", "eom")
"""The kinds of tokens that end a text, a turn, or a message that calls a tool."""
_TEXTS_OF_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"),
        *("<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>"),
    )
)
"""The texts by which llama.cpp finds these tokens, because many files do not name them."""


class Metadata:
    """The metadata of an architecture."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self._file, self._prefix = file, f"{name}."

    def refuse_others(self, words: Collection[str]) -> None:
        """Raise for properties of the architecture other than these."""
        for key in self._file.metadata:
            if key.startswith(self._prefix) and key.removeprefix(self._prefix) not in words:
                raise UnsupportedError(
                    "tpcompile does not read this property of a GGUF file",
                    where=str(self._file.path),
                    got=shortened(key),
                    hint="Use a checkpoint of Hugging Face",
                )

    def tensor(self, name: str) -> GgufTensor:
        """Return a tensor of the file."""
        if name not in self._file.tensors:
            raise CheckpointError(f"The file lacks the tensor {name}", where=str(self._file.path))
        return self._file.tensors[name]

    def has(self, word: str) -> bool:
        """Return whether the file has a property."""
        return self._prefix + word in self._file.metadata

    def count(self, word: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer of at least `least`."""
        if not self.has(word):
            word = _AS_MANY_AS.get(word, word)
        value = self._file.metadata.get(self._prefix + word, default)
        if type(value) is not int or not least <= value < 1 << 31:
            self.refuse(word, "a positive integer" if least else "0 or a positive integer")
        return int(value)

    def layers(self) -> int:
        """Return the number of layers, without the blocks that predict further tokens."""
        blocks, further = self.count(BLOCKS), self.count(PREDICTED, 0, least=0)
        if further >= blocks:
            self.refuse(PREDICTED, f"less than {blocks}, the number of blocks")
        return blocks - further

    def array(self, word: str, kind: type) -> list[Any] | None:
        """Return the elements of an array, or None if the file does not have it."""
        if not self.has(word):
            return None
        value = self._file.metadata[self._prefix + word]
        if not isinstance(value, list) or any(type(element) is not kind for element in value):
            self.refuse(word, f"an array of {kind.__name__}")
        return list(value)

    def number(self, word: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._file.metadata.get(self._prefix + word, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.refuse(word, "a positive number")
        return float(value)

    def ends(self, vocabulary: int) -> list[int]:
        """Return the tokens that end a text or a turn: by their names, or by their texts."""
        named = [self.token(word, vocabulary) for word in _ENDS]
        texts = self._file.metadata.get("tokenizer.ggml.tokens")
        known = texts[:vocabulary] if isinstance(texts, list) else []
        by_text = [number for number, text in enumerate(known) if text in _TEXTS_OF_ENDS]
        return list(dict.fromkeys([*(number for number in named if number is not None), *by_text]))

    def token(self, word: str, vocabulary: int) -> int | None:
        """Return the id of a token, or None if the file does not have it."""
        value = self._file.metadata.get(f"tokenizer.ggml.{word}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < vocabulary:
            raise CheckpointError(
                f"The id of the token {word} is not valid",
                where=str(self._file.path),
                got=shortened(repr(value)),
                expected=f"0 to {vocabulary - 1}",
            )
        return int(value)

    def rope(self, positions: int, width: int) -> dict[str, Any]:
        """Return the parameters of rotary tables."""
        parameters: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", 10000.0)}
        kind = self._file.metadata.get(f"{self._prefix}rope.scaling.type", "none")
        factors = self._rotary_factors(width)
        if factors and kind == "none":  # the only kind of transformers that takes any factors
            parameters |= {"short_factor": factors, "long_factor": factors}
            parameters |= {"factor": 1.0, "attention_factor": 1.0}
            parameters["original_max_position_embeddings"] = positions
            return {"rope_type": "longrope", **parameters}
        if kind == "none":
            return {"rope_type": "default", **parameters}
        if kind not in ("linear", "yarn") or factors:
            self.refuse("rope.scaling.type", "none" if factors else "none, linear or yarn")
        parameters |= {"rope_type": kind, "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            original = self.count("rope.scaling.original_context_length", positions)
            parameters["original_max_position_embeddings"] = original
        return parameters

    def _rotary_factors(self, width: int) -> list[float]:
        """Return the divisors of the frequencies of rotary tables; empty without the tensor."""
        tensor = self._file.tensors.get(ROTARY_FACTORS)
        if tensor is None:
            return []
        if tensor.kind != GgufKind.F32 or tensor.shape != (width // 2,):
            raise CheckpointError(
                f"The tensor {ROTARY_FACTORS} is not valid",
                where=str(tensor.path),
                got=f"{tensor.kind.name} of shape {list(tensor.shape)}",
                expected=f"F32 of shape [{width // 2}], half of the width of a head",
            )
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            factors = list(struct.unpack(f"<{width // 2}f", file.read(tensor.size)))
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise CheckpointError(
                f"The tensor {ROTARY_FACTORS} is not valid",
                where=str(tensor.path),
                got=shortened(str(factors)),
                expected="positive numbers",
            )
        return factors

    def refuse(self, word: str, expected: str) -> None:
        """Raise for a property with another value."""
        key = self._prefix + word
        raise CheckpointError(
            "The metadata of a GGUF file is not valid",
            where=str(self._file.path),
            got=f"{key}={shortened(repr(self._file.metadata.get(key)))}",
            expected=expected,
        )
