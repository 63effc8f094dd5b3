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
    the same tokens. Rounding changes the choice only where two tokens are almost equal.
    """
    torch.set_num_threads(threads)
    sides = {name: [one for one, _ in own] for name, own in results.items()}
    exact = _logits(directory, torch.float32, prompts, sides)
    rounded = _logits(directory, "auto", prompts, sides)
    found, allowed = {}, 0.0
    for name, own in sides.items():
        best = [rows.max(-1).values for rows in exact[name]]
        chosen = [rows.gather(-1, _column(new)) for rows, new in zip(exact[name], own, strict=True)]
        found[name] = _largest(best, chosen)
        eager = [
            rows.gather(-1, other.argmax(-1, keepdim=True))
            for rows, other in zip(exact[name], rounded[name], strict=True)
        ]
        allowed = max(allowed, _ROUNDING * _largest(best, eager))
    return found, allowed


def _column(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor(tokens)[:, None]


def _largest(best: Sequence[torch.Tensor], chosen: Sequence[torch.Tensor]) -> float:
    pairs = zip(best, chosen, strict=True)
    return max(float((one - other[:, 0]).max()) for one, other in pairs)


@torch.inference_mode()
def _logits(
    directory: Path,
    dtype: Any,
    prompts: Sequence[Sequence[int]],
    sides: Mapping[str, Sequence[Sequence[int]]],
) -> dict[str, list[torch.Tensor]]:
    """Return the logits that decide each new token, by side and request."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, trust_remote_code=False
    ).train(False)
    found: dict[str, list[torch.Tensor]] = {}
    for name, own in sides.items():
        found[name] = []
        for prompt, new in zip(prompts, own, strict=True):
            ids = torch.tensor([[*prompt, *new[:-1]]])
            logits = model(ids, use_cache=False, logits_to_keep=len(new)).logits[0]
            found[name].append(logits.float())
    return found
