"""`python -m benchmarks choose`: time to choose a token from the logits of a large vocabulary.

Each setting chooses for one row and for a batch, from logits of two kinds: *peaked*, as those of a
trained model, and *flat*, as those of random weights, where top-p keeps most of the vocabulary. The
settings run in turn, so that a slow moment of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.counts import positive
from benchmarks.report import write_json
from tpcompile.serving import SamplingParams
from tpcompile.serving.sampling import Sampler

VOCABULARY = 151_936
LIMIT_MS = 1.0
"""The longest median time per row."""
PROMPT = 1000
WARM_UP = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_k 5000": {"temperature": 1, "top_k": 5000},
    "top_p 0.8": {"temperature": 0.7, "top_p": 0.8},
    "top_p 0.95": {"temperature": 1, "top_p": 0.95},
    "min_p 0.05": {"temperature": 1, "min_p": 0.05},
    "top_p 0.9, min_p 0.02": {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    "greedy, penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "greedy, 20 logprobs": {"logprobs": 20},
    "top_k 20, top_p 0.8, penalties, 20 logprobs": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "logprobs": 20,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
}

Case = tuple[str, str, int]
"""A setting, a kind of logits, and a batch."""


@dataclass
class Measured:
    """Milliseconds per row of each run, by case."""

    threads: int
    vocabulary: int
    ms: dict[Case, list[float]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(median(runs) <= LIMIT_MS for runs in self.ms.values())


def logits_of(kind: str, rows: int, vocabulary: int) -> torch.Tensor:
    """Return rows of logits; peaked ones have a few tokens that are much better than others."""
    dice = torch.Generator().manual_seed(rows)
    flat = torch.randn(rows, vocabulary, generator=dice)
    if kind == "flat":
        return flat
    better = torch.rand(rows, vocabulary, generator=dice) < 1e-4
    return 2 * flat + torch.where(better, 14.0, 0.0)


def measure(batches: Sequence[int], turns: int, vocabulary: int, threads: int) -> Measured:
    """Choose tokens with all settings, in turn."""
    measured = Measured(threads, vocabulary)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kinds = {kind: logits_of(kind, max(batches), vocabulary) for kind in ("peaked", "flat")}
        cases = list(product(SETTINGS, kinds, batches))
        samplers = {
            (setting, row): Sampler(
                SamplingParams(seed=row, **SETTINGS[setting]), PROMPT, 0, frozenset()
            )
            for setting, row in product(SETTINGS, range(max(batches)))
        }
        tokens = [place % vocabulary for place in range(0, 7 * (PROMPT + 100), 7)]
        with torch.inference_mode():
            for turn in range(-WARM_UP, turns):
                for case in cases:
                    setting, kind, batch = case
                    begun = time.perf_counter()
                    for row in range(batch):
                        samplers[setting, row].choose(kinds[kind][row], tokens)
                    spent = 1e3 * (time.perf_counter() - begun) / batch
                    if turn >= 0:
                        measured.ms.setdefault(case, []).append(spent)
    finally:
        torch.set_num_threads(before)
    return measured


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a median is above the limit."""
    parser = argparse.ArgumentParser("python -m benchmarks choose", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--batches", type=positive, nargs="+", default=[1, 8], help="rows chosen in a run")
    add("--turns", type=positive, default=30, help="runs of each case")
    add("--vocabulary", type=positive, default=VOCABULARY, help="logits per row")
    add("--threads", type=positive, default=torch.get_num_threads(), help="threads of torch")
    options = parser.parse_args(arguments)
    measured = measure(options.batches, options.turns, options.vocabulary, options.threads)
    if options.json:
        write_json(to_json(measured))
    else:
        show(measured, Console(width=110, highlight=False))
    return 0 if measured.ok else 1


def to_json(measured: Measured) -> dict[str, Any]:
    cases = [
        {
            "setting": setting,
            "logits": kind,
            "batch": batch,
            "median": median(runs),
            "min": min(runs),
            "max": max(runs),
            "ok": median(runs) <= LIMIT_MS,
        }
        for (setting, kind, batch), runs in measured.ms.items()
    ]
    return {
        "ok": measured.ok,
        "threads": measured.threads,
        "vocabulary": measured.vocabulary,
        "limit_ms_per_row": LIMIT_MS,
        "ms_per_row": cases,
    }


def show(measured: Measured, console: Console) -> None:
    threads, width = measured.threads, measured.vocabulary
    table = Table(title=f"Choosing among {width:,} tokens, {threads} threads: ms per row, median")
    table.add_column("setting")
    columns = list(dict.fromkeys((kind, batch) for _, kind, batch in measured.ms))
    for kind, batch in columns:
        table.add_column(f"{kind}, batch {batch}", justify="right")
    for setting in dict.fromkeys(setting for setting, _, _ in measured.ms):
        table.add_row(setting, *(_cell(measured.ms[setting, *column]) for column in columns))
    console.print(table)
    verdict = "met" if measured.ok else "MISSED"
    console.print(f"at most {LIMIT_MS:g} ms per row: {verdict}")


def _cell(runs: Sequence[float]) -> str:
    return f"{median(runs):.2f} ({min(runs):.2f} to {max(runs):.2f})"
