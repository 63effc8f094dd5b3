"""Tests of the benchmark of guesses beside peers: its figures, its checkpoint and a run."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import speculation_peers
from benchmarks.editing import kept_editing
from benchmarks.speculation_peers import OURS, Case, Figures

LLAMA = "llama.cpp"


def figures(seconds: float, guessed: list[int], plain: list[int] | None = None) -> Figures:
    """Three tokens, the last two of which take so long; guesses compute them in one step."""
    times = [1.0, 1.0 + seconds / 2, 1.0 + seconds]
    return Figures([(plain or [1, 2, 3], [1.0, 2.0, 3.0], 2)], [(guessed, times, 1)])


def test_figures() -> None:
    assert figures(0.5, [1, 2, 4]).to_json() == {
        "plain_tokens_per_s": 1.0,
        "guessed_tokens_per_s": 4.0,
        "ratio": 4.0,
        "tokens_per_step": 2.0,
        "tokens": 3,
        "differ": 1,
    }


def test_problems() -> None:
    good = {OURS: figures(0.5, [1, 2, 3]), LLAMA: figures(0.6, [1, 2, 4])}
    assert Case(good, {"OpenVINO GenAI": "no package"}, {}, [[1, 2, 3]]).problems == []
    wrong = {OURS: figures(0.5, [1, 2, 4]), LLAMA: figures(0.4, [1, 5, 6], [1, 5, 6])}
    assert Case(wrong, {}, {"OpenVINO GenAI": "it ended"}, [[1, 2, 3]]).problems == [
        "OpenVINO GenAI failed: it ended",
        f"1 tokens of {OURS} differ with guesses",
        f"{LLAMA} does not write the text of the checkpoint",
        f"{LLAMA} is ahead of {OURS}",
    ]
    assert len(Case(wrong, {}, {}, None).problems) == 1  # of random weights, no text is known


def test_the_checkpoint_writes_the_document(tmp_path: Path) -> None:
    """Hugging Face's greedy text is the document, whatever is wrong in the prompt."""
    editing = kept_editing(tmp_path, "tiny-qwen3", 40)
    prompt = editing.prompt(0.2, Random(0))
    assert len(prompt) == 41 and 0 < sum(map(int.__ne__, prompt, editing.document)) < 20
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
    assert generated[0, 41:].tolist() == editing.document
    assert kept_editing(tmp_path, "tiny-qwen3", 40) == editing


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The side that is here runs with guesses and without; a peer that is missing is named."""
    options = "--model tiny-qwen3 --cases editing --document 60 --new 24 --rounds 1 --prompts 1"
    status = speculation_peers.main([*options.split(), "--sides", OURS, LLAMA, "--json"])
    report = json.loads(capsys.readouterr().out)["editing"]
    assert (status, report["problems"]) == (0, [])
    assert report["sides"][OURS]["differ"] == 0
    assert report["sides"][OURS]["tokens"] == 24
