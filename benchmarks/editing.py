"""Checkpoints of any shape that copy a document without its typing errors, and their prompts.

Random weights continue no text sensibly, so n-gram look-up would guess nothing right. Here the
token after each token is fixed: the row of the head for that token is the embedding of this one.
The layers have random weights, and change the residual little. So they cost what they always cost,
and the text is that of greedy decoding itself, on every side.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.words import save_tokenizer
from tpcompile.frontend import config_of

_ABOUT = "editing.json"
_SEED = 0
_SHARE = 0.02
"""The size of what a layer adds to the residual, relative to the embedding."""


@dataclass(frozen=True)
class Editing:
    """A checkpoint, the document that it writes, and the token after which it begins."""

    directory: Path
    document: list[int]
    begin: int

    def prompt(self, wrong: float, dice: Random) -> list[int]:
        """Return the document, in which a share of the tokens is wrong, and the begin."""
        strange = [token for token in range(self.begin) if token not in set(self.document)]
        copied = [
            dice.choice(strange) if dice.random() < wrong else token for token in self.document
        ]
        return [*copied, self.begin]


def kept_editing(directory: Path, preset: str, length: int) -> Editing:
    """Return the checkpoint in `directory`, with a document of `length` tokens; write it once."""
    about = directory / _ABOUT
    if not about.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, preset, length)
    stored = json.loads(about.read_text())
    return Editing(directory, stored["document"], stored["begin"])


@torch.inference_mode()
def _write(directory: Path, preset: str, length: int) -> None:
    config = config_of(f"preset:{preset}")
    config.tie_word_embeddings, config.dtype = False, torch.bfloat16
    begin = config.vocab_size - 1
    document = Random(_SEED).sample(range(begin), length)
    torch.manual_seed(_SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = dict(model.named_parameters())
    embedding = torch.randn(names["model.embed_tokens.weight"].shape)
    for name, parameter in names.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.copy_(torch.randn(parameter.shape) * _SHARE / parameter.shape[1] ** 0.5)
    before = torch.arange(config.vocab_size)
    cycle = torch.tensor([begin, *document])
    before[cycle] = cycle.roll(1)
    names["model.embed_tokens.weight"].copy_(embedding)
    names["lm_head.weight"].copy_(embedding[before] / config.hidden_size**0.5)
    model.save_pretrained(directory)
    save_tokenizer(directory, config.vocab_size)
    about = {"document": document, "begin": begin}
    (directory / _ABOUT).write_text(json.dumps(about))  # last: an unfinished one is written again
