"""Steps of an engine with and without a structure, in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import tpcompile
from benchmarks.grammars.records import record
from tpcompile.serving import Engine, SamplingParams, Structure
from tpcompile.serving.structure import JSON_SCHEMA

KINDS = ("token", "logits", "structure")
"""A token that the program chooses, a token chosen from logits, and one with a mask besides."""
_PROMPT = range(1, 33)
_SCHEMA_BYTES = 10_000


@dataclass
class Steps:
    """Milliseconds of decode steps, by kind."""

    threads: int
    batch: int
    ms: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    @property
    def share(self) -> float:
        """The time of a mask over that of a step without one."""
        logits = median(self.ms["logits"])
        return (median(self.ms["structure"]) - logits) / logits

    def to_json(self) -> dict[str, Any]:
        medians = {f"{kind}_ms": median(runs) for kind, runs in self.ms.items()}
        return {"threads": self.threads, "batch": self.batch, **medians, "share": self.share}


def measure_steps(
    model: tpcompile.CompiledModel, tokenizer: Any, batch: int, tokens: int, turns: int
) -> Steps:
    """Run a batch of each kind in turn, and time the steps after the prompts."""
    import torch

    steps = Steps(torch.get_num_threads(), batch)
    structure = Structure(JSON_SCHEMA, record(_SCHEMA_BYTES)[0])
    options: dict[str, dict[str, Any]] = {
        "token": {},
        "logits": {"min_tokens": tokens},
        "structure": {"structure": structure},
    }
    with Engine(model, tokenizer=tokenizer, max_batch=batch) as engine:
        for turn in range(turns + 1):
            for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, **options[kind])
                for _ in range(batch):
                    engine.add(list(_PROMPT), params)
                engine.step()
                ms = []
                while True:
                    begun = time.perf_counter()
                    if not engine.step():
                        break
                    ms.append(1e3 * (time.perf_counter() - begun))
                steps.ms[kind] += ms if turn else []
    return steps
