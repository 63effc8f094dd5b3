"""The tokens of sides, judged by the model in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.kinds import Continued

_ROUNDING = 2.0
"""The allowed gap, as a multiple of that of Hugging Face's model in its own dtype."""


def gaps(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    results: Mapping[str, Sequence[Continued]],
    threads: int,
) -> tuple[dict[str, float], float]:
    """Return the largest gap of each side, and the gap that rounding explains.

    The gap of a token is the distance of its logit from the best one, by the model in fp32 after
    the same tokens. Rounding changes the choice only where two tokens are almost equal. The allowed
    gap is twice that of Hugging Face's model in its own dtype, on the texts of the first side.
    """
    torch.set_num_threads(threads)
    sides = {
        name: [(*prompt, *new) for prompt, (new, _) in zip(prompts, continuations, strict=True)]
        for name, continuations in results.items()
    }
    lengths = [len(prompt) for prompt in prompts]
    texts = {
        text: size
        for side_texts in sides.values()
        for text, size in zip(side_texts, lengths, strict=True)
    }
    first_texts = dict(zip(next(iter(sides.values())), lengths, strict=True))
    exact = _logits(directory, torch.float32, texts)
    rounded = _logits(directory, "auto", first_texts)
    largest_gaps = {
        name: max(
            _largest(exact[text], _column(text[size:]))
            for text, size in zip(side_texts, lengths, strict=True)
        )
        for name, side_texts in sides.items()
    }
    eager = (_largest(exact[text], rounded[text].argmax(-1, keepdim=True)) for text in first_texts)
    return largest_gaps, _ROUNDING * max(eager)


def _column(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor(tokens)[:, None]


def _largest(logits: torch.Tensor, chosen: torch.Tensor) -> float:
    """Return the largest distance of the chosen tokens' logits from the best ones."""
    return float((logits.max(-1, keepdim=True).values - logits.gather(-1, chosen)).max())


@torch.inference_mode()
def _logits(
    directory: Path, dtype: Any, texts: Mapping[tuple[int, ...], int]
) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the logits that decide the new tokens of each text, given the size of its prompt."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, trust_remote_code=False
    ).train(False)
    text_logits = {}
    for text, size in texts.items():
        ids = torch.tensor([text[:-1]])
        logits = model(ids, use_cache=False, logits_to_keep=len(text) - size).logits[0]
        text_logits[text] = logits.float()
    return text_logits
