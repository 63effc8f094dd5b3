"""What an untested library removed ends in an error that names both versions."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from typing import Any

import pytest
import torch
from transformers import masking_utils
from transformers.generation import stopping_criteria

import tpcompile
from tests.runtime.eager_pair import PAD, prompt, tiny_both
from tpcompile.cli import main
from tpcompile.errors import UnsupportedError
from tpcompile.libraries import library_errors

SAID = (
    r"tpcompile does not work with transformers 9\.1\. Found {found}.*"
    r"Expected transformers>=[\d.]+,<[\d.]+\. "
    r"Run `pip install 'transformers>=[\d.]+,<[\d.]+'`\."
)


def _removed(version: str) -> str:
    return SAID.replace("{found}", version)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the installed transformers have a version that nobody tested."""
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "9.1" if name == "transformers" else real(name)
    )


@pytest.fixture
def without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a name that capture imports."""
    monkeypatch.delattr(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS")


@pytest.mark.usefixtures("newer", "without_masks")
def test_a_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "preset:tiny-qwen3", "--tp", "2"]) == 2
    line = capsys.readouterr().err.strip()
    assert re.fullmatch("error: " + _removed("ImportError: cannot import name"), line), line


@pytest.mark.usefixtures("newer", "without_masks")
@pytest.mark.parametrize("entry", ["compile", "capture", "schedule"])
def test_calls_from_python(entry: str) -> None:
    with pytest.raises(UnsupportedError, match=_removed("ImportError: cannot import name")):
        getattr(tpcompile, entry)("preset:tiny-qwen3")


@pytest.mark.usefixtures("newer")
def test_the_first_import(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("api", "runtime.generation", "runtime.launches"):
        monkeypatch.delitem(sys.modules, f"tpcompile.{module}", raising=False)
    monkeypatch.delattr(stopping_criteria, "EosTokenCriteria")
    with pytest.raises(UnsupportedError, match=_removed("")):
        _ = tpcompile.compile


@pytest.mark.usefixtures("newer")
def test_a_method_that_generate_calls_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_both().compiled
    monkeypatch.setattr(type(model), "_sample", lambda self, input_ids: input_ids)
    with pytest.raises(UnsupportedError, match=_removed("TypeError: ")):
        model.generate(prompt(3)["input_ids"], max_new_tokens=2, pad_token_id=PAD)


@pytest.mark.usefixtures("newer")
def test_errors_of_the_users_code_stay_what_they_are() -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> Any:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        tiny_both().compiled.generate(
            prompt(3)["input_ids"], max_new_tokens=2, pad_token_id=PAD, logits_processor=[fails]
        )


@pytest.mark.usefixtures("without_masks")
def test_tested_versions_show_the_mistake_itself() -> None:
    with pytest.raises(ImportError, match="ALL_MASK_ATTENTION_FUNCTIONS"), library_errors():
        tpcompile.capture("preset:tiny-qwen3")
