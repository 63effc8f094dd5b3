"""Text in and out: a checkpoint's tokenizer, and generation with the time that it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, StoppingCriteria, TextStreamer

from tpcompile.errors import CheckpointError, UnsupportedError, UsageError
from tpcompile.json_files import read_object, shortened

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WITHOUT = "Give the prompt as numbers: --prompt-ids 1,2,3"


def tokenizer_of(model: str) -> Any:
    """The tokenizer beside a checkpoint; presets and bare configurations have none."""
    if model.startswith("preset:"):
        raise CheckpointError(f"{model} is a configuration, without a tokenizer", hint=_WITHOUT)
    # Where there are no files Hugging Face makes an empty tokenizer for the type of the model.
    directory = Path(model)
    if directory.is_dir() and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{model} holds no tokenizer",
            expected=" or ".join(_TOKENIZER_FILES),
            hint=f"Copy the tokenizer's files beside the weights. {_WITHOUT}",
        )
    load: Any = AutoTokenizer.from_pretrained
    settings = directory / "tokenizer_config.json"
    names_code = False
    try:
        names_code = settings.is_file() and "auto_map" in read_object(settings)
        return load(model, trust_remote_code=False)
    except Exception as error:  # reading and parsing each raise errors of their own
        if names_code:
            raise UnsupportedError(
                f"The tokenizer of {model} is code of its own, which tpcompile does not run",
                got=f"an auto_map in {settings.name}",
                expected="a tokenizer that transformers itself has",
                hint=_WITHOUT,
            ) from error
        first = next(iter(str(error).splitlines()), "")
        raise CheckpointError(
            f"The tokenizer of {model} could not be read",
            got=f"{type(error).__name__}: {shortened(first)}",
            hint=_WITHOUT,
        ) from error


def encode_prompt(tokenizer: Any, prompt: str, chat: bool = False) -> list[int]:
    """The prompt's ids; with `chat`, those of a user's turn that waits for an answer."""
    if not chat:
        return _some(tokenizer(prompt, verbose=False)["input_ids"])  # `verbose` warns of lengths
    if not tokenizer.chat_template:
        raise UsageError(
            "The tokenizer has no chat template",
            expected="that of a model trained to chat",
            hint="Leave out --chat",
        )
    turns = [{"role": "user", "content": prompt}]
    found = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return _some(found["input_ids"])


def _some(ids: Any) -> list[int]:
    if not ids:
        raise UsageError("The prompt comes to no tokens", hint="Give it at least one word")
    return [int(token) for token in ids]


@dataclass(frozen=True)
class Generated:
    """A prompt and what follows it."""

    ids: list[int]
    """Of the prompt too."""
    prompt_tokens: int
    prefill_s: float
    """Until the first new token was there."""
    decode_tokens_per_s: float | None
    """Of the tokens after the first; None if there was no second."""

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens


def generate_timed(
    model: Any, prompt: Sequence[int], streamer: Any | None = None, **options: Any
) -> Generated:
    """Hugging Face's `generate` for one prompt; `options` are its own."""
    clock = _Clock()
    ids = torch.tensor([list(prompt)], device=model.device)
    if streamer is not None:
        options["streamer"] = streamer
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), stopping_criteria=[clock], **options
    )
    return Generated(found[0].tolist(), len(prompt), clock.prefill_s, clock.tokens_per_s)


class _Clock(StoppingCriteria):
    """Stops nothing: it is asked after every token, and notes when."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        self._times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def prefill_s(self) -> float:
        return self._times[1] - self._times[0]

    @property
    def tokens_per_s(self) -> float | None:
        first, last, count = self._times[1], self._times[-1], len(self._times) - 2
        return count / (last - first) if count else None


class TextWriter(TextStreamer):
    """Hands on text, word by word, as it is generated."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None], skip_prompt: bool) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text + ("\n" if stream_end else ""))


def is_first_process() -> bool:
    """Whether this process is the one to print: under a launcher each rank has a front."""
    return not dist.is_initialized() or dist.get_rank() == 0
