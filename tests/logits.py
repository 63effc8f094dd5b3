"""Logits of compiled checkpoints beside those of the model that they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import tpcompile
from tests.models import TOLERANCE, relative_error

IDS = torch.arange(1, 25).reshape(2, 12)
BACKENDS = ("torch", "reference", "native")


def in_turn(cases: Iterable[str]) -> list[tuple[str, str, int]]:
    """Return each case with each backend, each with another of 1, 2 and 3 ranks.

    All pairs of a case, a backend and a tp occur, but not all triples: the ranks' parts of a weight
    depend on the case and on tp alone, and are the same for all backends.
    """
    return [
        (case, backend, 1 + (number + place) % 3)
        for number, case in enumerate(cases)
        for place, backend in enumerate(BACKENDS)
    ]


def check_logits(checkpoint: Path, truth: Any, backend: str, tp: int) -> None:
    """Compare logits in fp32. Prompts run on modules, single tokens on the backend."""
    with torch.no_grad():
        wanted = truth(IDS).logits
    options: dict[str, Any] = {"tp": tp, "simulate": True, "backend": backend}
    with tpcompile.compile(str(checkpoint), **options, dtype=torch.float32) as model:
        prefill = model(IDS[:, :-1], use_cache=True)
        assert relative_error(prefill.logits, wanted[:, :-1]) < TOLERANCE
        step = model(IDS[:, -1:], past_key_values=prefill.past_key_values, use_cache=True)
        assert relative_error(step.logits, wanted[:, -1:]) < TOLERANCE
        assert model.steps.program == (backend != "torch")


def error_of(directory: Path, truth: Any, tp: int, backend: str) -> float:
    """Return the error of a token's logits, relative to the largest of the truth."""
    with torch.no_grad():
        wanted = truth(IDS).logits[:, -1:]
    options: dict[str, Any] = {"tp": tp, "simulate": True, "backend": backend}
    with tpcompile.compile(str(directory), **options) as model:
        past = model(IDS[:, :-1], use_cache=True).past_key_values
        step = model(IDS[:, -1:], past_key_values=past, use_cache=True)
        assert model.steps.program == (backend != "torch")
        return relative_error(step.logits, wanted)
