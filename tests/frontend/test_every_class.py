"""Each causal LM of Hugging Face equals eager, or is refused for a known reason."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from tests.captures import captured_once
from tests.causal_lms import (
    EQUAL,
    KINDS,
    MOST_PARAMETERS,
    REASONS,
    VARIANTS,
    VOCABULARY,
    WINDOW,
    cannot_be_built,
    is_mapped,
    tiny_config,
    tiny_model,
)
from tests.models import TOLERANCE, relative_error
from tpcompile.errors import CompileError
from tpcompile.passes import default_pipeline, run_passes
from tpcompile.runtime.cache_name import CACHE
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.weights import weights_of

pytestmark = pytest.mark.filterwarnings("ignore")

_HUGGING_FACE = (AttributeError, ImportError, StrictDataclassError, ValueError)
"""Errors that Hugging Face raises for configurations that it cannot build."""

LENGTH = 4 * WINDOW - 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if is_mapped(kind)])
def test_equal_or_refused_by_name(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    if cannot_be_built(kind):
        try:
            tiny_model(tiny_config(kind), on_meta=True)
        except _HUGGING_FACE:
            return  # other versions may build it: then it is checked as all others
    reason = _check(tiny_config(kind), capfd)
    assert reason is None or kind not in EQUAL, reason


def test_the_table_of_the_page_has_the_classes_that_must_compile() -> None:
    page = Path(__file__).parents[2] / "docs" / "running.md"
    section = page.read_text(encoding="utf-8").partition("## Other models")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {kind for row in rows for kind in re.findall(r"`(\w+)`", row)} == EQUAL


@pytest.mark.slow  # two compilations each
@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=str)
def test_variants(kind: str, changes: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    if kind not in KINDS:
        pytest.skip(f"this version of Hugging Face has no {kind}")
    _check(tiny_config(kind, **changes), capfd)


def _check(config: Any, capfd: pytest.CaptureFixture[str]) -> str | None:
    """Return the known reason why the class is refused, or None if it equals eager."""
    on_meta = tiny_model(config, on_meta=True)
    capfd.readouterr()
    try:
        captured = captured_once(on_meta)
        runs = [run_passes(captured.graph, default_pipeline(tp)) for tp in (2, 3)]
    except CompileError as refusal:
        message = str(refusal)
        assert capfd.readouterr().err == ""
        assert type(on_meta).__name__.removesuffix("ForCausalLM") in message
        reasons = [reason for reason, pattern in REASONS.items() if re.search(pattern, message)]
        assert reasons, f"refused for a reason that is not in the table: {message}"
        return reasons[0]
    assert sum(p.numel() for p in on_meta.parameters()) < MOST_PARAMETERS
    eager = tiny_model(config)
    expected = _runs(eager)
    captured = dataclasses.replace(captured, model=eager)
    for graph, stages in runs:
        weights = weights_of(captured, eager, None)
        with CompiledModel.simulated(captured, graph, stages, weights) as compiled:
            for actual, wanted in zip(_runs(compiled), expected, strict=True):
                assert relative_error(actual, wanted) < TOLERANCE
    return None


def _runs(model: Any) -> list[torch.Tensor]:
    """Return logits of two prompts, of the same prompts padded, and of one cached step."""
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :WINDOW] = 0
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits
        padded = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        cache = model(ids[:, :-1], use_cache=True)[CACHE]
        step = model(ids[:, -1:], use_cache=True, **{CACHE: cache}).logits
    return [plain, padded, step]
