"""Logits of compiled checkpoints beside those of the model that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tpcompile
from tests.models import TOLERANCE, relative_error

IDS = torch.arange(1, 25).reshape(2, 12)


def check_logits(checkpoint: Path, truth: Any, backend: str, tp: int) -> None:
    """Compare logits in fp32. Prompts run on modules, single tokens on the backend."""
    with torch.no_grad():
        wanted = truth(IDS).logits
    options: dict[str, Any] = {"tp": tp, "simulate": True, "backend": backend}
    with tpcompile.compile(str(checkpoint), **options, dtype=torch.float32) as model:
        found = model(IDS[:, :-1], use_cache=True)
        assert relative_error(found.logits, wanted[:, :-1]) < TOLERANCE
        step = model(IDS[:, -1:], past_key_values=found.past_key_values, use_cache=True)
        assert relative_error(step.logits, wanted[:, -1:]) < TOLERANCE
        assert model.steps.program == (backend != "torch")
