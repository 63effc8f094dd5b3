"""`make_demo`: a tiny Qwen3, Qwen3-MoE or Qwen3.5 that is trained here and writes sensible text.

A draft model of a tenth of its size is trained beside it, for speculation. With tools it is a Qwen3
that answers in chats instead, and calls the tools of `chats.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from tpcompile.demo.lessons import chat_batches, chat_tokenizer, prepare_to_copy
from tpcompile.demo.text import all_sentences, documents
from tpcompile.errors import UsageError, did_you_mean
from tpcompile.runtime.new_directory import check_new_directory, new_directory

VOCABULARY = 947
"""The vocabulary of the text with one token per word. It is prime, so no tp divides it."""

SHAPES = ((8, 256), (16, 128))
"""Rows and lengths of alternating batches.

Long rows train long-range recall; short rows start at more places."""

WARM_STEPS = 20

END, PAD = "<|endoftext|>", "<|pad|>"

MODEL, DRAFT = "model", "draft"
"""The models that are trained. The second one is also the name of its directory."""

Follow = Callable[[str, int, float], None]
"""Callback that receives MODEL or DRAFT, its number of finished steps and its latest loss."""


@dataclass(frozen=True)
class Size:
    """The sizes of a model, and the learning rate that suits them."""

    sizes: dict[str, Any]
    peak_rate: float


_SIZES = {
    MODEL: Size(
        {
            "hidden_size": 120,
            "intermediate_size": 328,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 24,
        },
        peak_rate=4e-3,
    ),
    DRAFT: Size(
        {
            "hidden_size": 40,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 24,
        },
        peak_rate=1e-2,
    ),
}
"""Few tp divide the sizes of the model, to exercise uneven splits."""


@dataclass(frozen=True)
class Architecture:
    """A kind of demo model."""

    model_type: str
    """The name of its configuration in transformers."""
    sizes: dict[str, Any]
    """The sizes that other kinds do not have."""
    steps: int
    """Enough steps for text without mistakes."""


_LINEAR = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.5,
    },
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 136,
    "norm_topk_prob": True,
}
ARCHITECTURES = {
    "qwen3": Architecture("qwen3", {}, 350),
    "qwen3-moe": Architecture("qwen3_moe", _EXPERTS, 350),
    "qwen3.5": Architecture("qwen3_5_text", _LINEAR, 350),
}
"""The demo models by name. Training takes 50, 80 and 85 s on two cores, and 12 s for a draft."""
DEFAULT = "qwen3"

STEPS_WITH_TOOLS = 320
"""Enough steps for calls without mistakes. They take 60 seconds on one core."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels."""


def make_demo(
    directory: str | Path,
    seed: int = 0,
    steps: int | None = None,
    follow: Follow | None = None,
    arch: str = DEFAULT,
    tools: bool = False,
) -> float:
    """Train the demo model and its draft, save them and return the final loss of the model.

    Both are Hugging Face checkpoints, and the draft is in the subdirectory `draft`. `directory`
    must be new or empty. `steps` is by default enough for text without mistakes. The same seed and
    steps give the same weights on the same machine with the same number of threads.

    With `tools`, the model learns chats with calls of tools in place of stories, and has no draft.
    """
    if arch not in ARCHITECTURES:
        raise UsageError(
            f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}",
            hint=did_you_mean(arch, ARCHITECTURES),
        )
    if tools and arch != DEFAULT:
        raise UsageError(f"tools need the arch {DEFAULT!r}, got {arch!r}")
    steps = default_steps(arch, tools) if steps is None else steps
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps!r}")
    check_new_directory(directory)  # now, not after a minute of training
    tokenizer = chat_tokenizer() if tools else demo_tokenizer()
    batches = chat_batches if tools else _batches
    configs = {MODEL: demo_config(tokenizer, arch)}
    if not tools:
        configs[DRAFT] = draft_config(tokenizer)
    trained = {}
    for part, config in configs.items():
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            model = _new_model(config, tools)
            loss = _train(model, part, batches(tokenizer, seed), steps, follow)
        trained[part] = model.train(False), loss
    try:
        with new_directory(directory) as staging, _no_bars():
            for part, (model, _) in trained.items():
                place = staging if part == MODEL else staging / DRAFT
                model.save_pretrained(place)
                tokenizer.save_pretrained(place)
    except SafetensorError as error:  # for example on a full disk
        raise UsageError(f"{directory} cannot be written", got=str(error)) from error
    return trained[MODEL][1]


def default_steps(arch: str, tools: bool) -> int:
    """Return enough steps for text without mistakes."""
    return STEPS_WITH_TOOLS if tools else ARCHITECTURES[arch].steps


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Disable Hugging Face's progress bars, which also appear without a terminal."""
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def demo_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer on the grammar, so that each word is one token."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = all_sentences()
    pairs.train_from_iterator([*texts, *(f" {text}" for text in texts)], trainer)
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=pairs, eos_token=END, pad_token=PAD, model_max_length=512
    )
    return wrapped


def demo_config(tokenizer: PreTrainedTokenizerFast, arch: str = DEFAULT) -> Any:
    """Return the configuration of a demo model."""
    kind = ARCHITECTURES[arch]
    return _config(tokenizer, kind.model_type, _SIZES[MODEL].sizes | kind.sizes)


def draft_config(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return the configuration of a draft, which is a Qwen3 for every demo model."""
    return _config(tokenizer, ARCHITECTURES[DEFAULT].model_type, _SIZES[DRAFT].sizes)


def _config(tokenizer: PreTrainedTokenizerFast, model_type: str, sizes: dict[str, Any]) -> Any:
    return AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
        **sizes,
    )


def _batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """Yield token ids in alternating SHAPES. Rows start at different sentences of documents."""
    stories = documents(seed)
    places = count()
    for rows, length in cycle(SHAPES):
        texts = []
        for _ in range(rows):
            first, *following = islice(stories, 3)  # only one sentence of the first may be used
            begin = next(places) % len(first)
            texts.append(END.join(" ".join(part) for part in (first[begin:], *following)))
        encodings = tokenizer.backend_tokenizer.encode_batch(texts)
        ids = torch.tensor([row.ids[:length] for row in encodings])
        yield ids, ids


def _new_model(config: Any, tools: bool) -> Any:
    """Return a model with random weights."""
    make: Any = AutoModelForCausalLM.from_config
    model = make(config)
    if tools:
        prepare_to_copy(model)
        model.generation_config.do_sample = False  # arguments are copied, not invented
    return model


def _train(
    model: Any, part: str, batches: Iterator[Batch], steps: int, follow: Follow | None
) -> float:
    """Train a model and return its final loss."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    model.train()
    loss = math.inf
    for step, (ids, labels) in enumerate(islice(batches, steps)):
        for group in optimizer.param_groups:
            group["lr"] = _SIZES[part].peak_rate * _share_of_rate(step, steps)
        step_loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        step_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = float(step_loss.detach())
        if follow is not None:
            follow(part, step + 1, loss)
    return loss


def _share_of_rate(step: int, steps: int) -> float:
    """Return a linear warm-up times a cosine decay to zero."""
    warm = min(1.0, (step + 1) / WARM_STEPS)
    return warm * (1 + math.cos(math.pi * step / steps)) / 2
