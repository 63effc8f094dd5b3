"""Decode steps of small models, with the results of eager and of the torch module."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig

from tests.models import pair_of
from tpcompile.compare.group_rows import TOKEN
from tpcompile.compare.program import Batch, Case, plan_for, prepare
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.presets import preset
from tpcompile.vm.lowering import Lowered, lower
from tpcompile.vm.program import Program

QWEN2, QWEN3 = "preset:tiny-qwen2", "preset:tiny-qwen3"
HYBRID = "qwen3.5 in turns"
"""A model with linear attention in layers 0 and 2, and gated attention in layers 1 and 3."""
BLOCK = 4
BATCH = Batch((9, 6, 1))
"""The last sequence has empty spans and no history."""
SPANS = 2
WORKERS = 5


@lru_cache(maxsize=16)
def case_of(model: str, tp: int = 1, *, interleaved: bool = False, batch: Batch = BATCH) -> Case:
    """Return the step of a preset with weights from seed 0, or of a model defined here."""
    passes = decode_pipeline(tp, SPANS, BLOCK, interleaved)
    if model in _MADE:
        return prepare(_MADE[model](), passes, batch)
    return prepare(model, passes, batch, random_weights=0)


@lru_cache(maxsize=32)
def lowered_of(model: str, tp: int, lowering: str = "heads", **options: Any) -> Lowered:
    """Lower the case into small instructions, so that each worker has some."""
    case = case_of(model, tp, **options)
    return lower(case.graph, replace(plan_for(case, WORKERS, lowering), grain=4))


def in_order(lowered: Lowered) -> Program:
    """Return a program that runs instructions in order; the schedule does not affect the bits."""
    count = len(lowered.instructions)
    nothing: tuple[Any, ...] = ((),) * count
    queues = [
        tuple(n for n in range(count) if lowered.instructions[n].rank == rank)
        for rank in range(lowered.ranks)
    ]
    return Program(
        lowered.buffers,
        lowered.instructions,
        tuple(queues),
        nothing,
        nothing,
        ranks=lowered.ranks,
        name=lowered.name,
    )


def _with_biases() -> Any:
    """Return a model with biases in all attention projections, including the row-parallel one."""
    return tiny("qwen3", attention_bias=True)


def _with_a_tie() -> Any:
    """Return a model in which two tokens tie for the first sequence's best."""
    model = tiny("qwen3")
    (case_step,) = case_of(QWEN3).steps
    best = int(case_step.step.eager.values[TOKEN][0])
    read = set(torch.cat(case_step.texts.tokens).tolist())
    table = model.get_input_embeddings().weight
    other = next(n for n in range(len(table) - 1, best, -1) if n not in read)
    with torch.no_grad():
        table[other] = table[best]
    return model


def _in_turns() -> Any:
    return tiny("qwen3.5", full_attention_interval=2)


def tiny(kind: str, **changes: Any) -> Any:
    """Return a tiny preset in eager with a changed configuration and weights from seed 0."""
    return copy.deepcopy(_tiny(kind, **changes))


@lru_cache(maxsize=8)
def _tiny(kind: str, **changes: Any) -> Any:
    return pair_of(AutoConfig.for_model(**{**preset(f"tiny-{kind}"), **changes})).eager


_MADE = {
    "qwen3 with biases": _with_biases,
    "qwen3 with a tie": _with_a_tie,
    HYBRID: _in_turns,
}
