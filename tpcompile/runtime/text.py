"""Text input and output: a checkpoint's tokenizer, and timed generation."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedTokenizerBase, StoppingCriteria, TextStreamer

from tpcompile.errors import CheckpointError, UnsupportedError, UsageError
from tpcompile.gguf import is_gguf
from tpcompile.hub import is_cached, unreachable
from tpcompile.json_files import read_object, shortened
from tpcompile.runtime.gguf_tokenizer import WITHOUT_TOKENIZER, gguf_tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def tokenizer_of(model: str) -> Any:
    """Load the tokenizer of a checkpoint; presets and bare configurations have none."""
    if model.startswith("preset:"):
        raise CheckpointError(
            f"{model} is a configuration and has no tokenizer", hint=WITHOUT_TOKENIZER
        )
    if is_gguf(model):
        return gguf_tokenizer(model)
    # If there are no files, Hugging Face creates an empty tokenizer for the model type.
    directory = Path(model)
    if directory.is_dir() and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"The directory {model} holds no tokenizer",
            expected=" or ".join(_TOKENIZER_FILES),
            hint=f"Copy the tokenizer's files next to the weights. {WITHOUT_TOKENIZER}",
        )
    offline = "" if directory.is_dir() else unreachable(model)
    if offline and not any(is_cached(model, name) for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"The cache of the hub holds no tokenizer of {model}, and {offline}",
            hint=WITHOUT_TOKENIZER,
        )
    load: Any = AutoTokenizer.from_pretrained
    settings = directory / "tokenizer_config.json"
    names_code = False
    try:
        names_code = settings.is_file() and "auto_map" in read_object(settings)
        return load(model, trust_remote_code=False, local_files_only=bool(offline))
    except Exception as error:  # reading and parsing raise different errors
        if names_code:
            raise UnsupportedError(
                f"The tokenizer of {model} is custom code, which tpcompile does not run",
                got=f"auto_map in {settings.name}",
                expected="a tokenizer class of transformers",
                hint=WITHOUT_TOKENIZER,
            ) from error
        first = next(iter(str(error).splitlines()), "")
        raise CheckpointError(
            f"The tokenizer of {model} cannot be read",
            got=f"{type(error).__name__}: {shortened(first)}",
            hint=WITHOUT_TOKENIZER,
        ) from error


def encode_prompt(tokenizer: Any, prompt: str, chat: bool = False, **options: Any) -> list[int]:
    """Return the prompt's ids; with `chat`, as a user turn followed by the generation prompt.

    `options` are those of `encode_chat`.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "The prompt must be text that UTF-8 can encode",
            got="half of a surrogate pair",
            hint="Bytes of a command line that are not UTF-8 become such characters",
        ) from error
    if not chat:
        encoded = tokenizer(prompt, verbose=False)  # `verbose` warns about lengths
        return _prompt_ids(encoded["input_ids"])
    if not tokenizer.chat_template:
        raise UsageError(
            "The tokenizer has no chat template",
            expected="the tokenizer of a model trained to chat",
            hint="Leave out --chat",
        )
    return encode_chat(tokenizer, [{"role": "user", "content": prompt}], **options)


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> list[int]:
    """Return the ids of messages, by default followed by the generation prompt.

    `options` are variables of the chat template, such as `enable_thinking=False`.
    """
    try:
        encoded = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            return_dict=True,
            **options,
        )
    except Exception as error:  # a template may raise anything
        raise UsageError(
            "The chat template refuses the messages",
            got=f"{type(error).__name__}: {shortened(str(error))}",
        ) from error
    return _prompt_ids(encoded["input_ids"])


def check_template_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise if variables of a chat template, given as `name`, clash with arguments of its call."""
    clashes = _SET_BY_CALLS & options.keys()
    if clashes:
        raise UsageError(
            f"{name} must be variables of the chat template, got {min(clashes)!r}, which "
            "tpcompile or its tokenizer sets",
            hint="Leave it out",
        )


_SET_BY_CALLS = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *("messages", "conversations"),
}
"""The arguments that rendering a template has besides the template's variables."""


def _prompt_ids(ids: Any) -> list[int]:
    if not ids:
        raise UsageError(
            "The prompt must encode to at least one token",
            hint="Pass at least one word",
        )
    return [int(token) for token in ids]


@dataclass(frozen=True)
class Generated:
    """A prompt and its continuation, with timings."""

    ids: list[int]
    """The ids of the prompt and of the new tokens."""
    prompt_tokens: int
    prefill_s: float
    """The seconds until the first new token."""
    decode_tokens_per_s: float | None
    """The rate of the tokens after the first; None if there is only one."""

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens


def generate_timed(
    model: Any, prompt: Sequence[int], streamer: Any | None = None, **options: Any
) -> Generated:
    """Run and time Hugging Face's `generate` for one prompt; `options` are passed to it."""
    clock = _Clock()
    ids = torch.tensor([list(prompt)], device=model.device)
    if streamer is not None:
        options["streamer"] = streamer
    sequences = model.generate(
        ids, attention_mask=torch.ones_like(ids), stopping_criteria=[clock], **options
    )
    return Generated(sequences[0].tolist(), len(prompt), clock.prefill_s, clock.tokens_per_s)


class _Clock(StoppingCriteria):
    """A stopping criterion that never stops; it records the time of every token."""

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
    """A streamer that passes each new word to a callback."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None], skip_prompt: bool) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text + ("\n" if stream_end else ""))


def is_first_process() -> bool:
    """Return whether this process prints; under a launcher only rank 0 does."""
    return not dist.is_initialized() or dist.get_rank() == 0
