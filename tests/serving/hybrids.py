"""A tiny model with linear attention, whose tokens depend on the first ones of a long prompt."""

from __future__ import annotations

from typing import Any

import torch

from tests.runtime.eager_pair import lively

CHUNK = 64
"""The shortest chunk of an engine that gives the bits of a run alone."""


def remembering() -> Any:
    """Return an eager model whose states decay slowly, so that a wrong one changes tokens."""
    eager = lively("tiny-qwen3.5")
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if name.endswith("A_log"):
                parameter -= 6
    return eager
