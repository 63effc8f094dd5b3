"""Decode steps of small models that eager and the torch module have run already."""

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
BLOCK = 4
BATCH = Batch((9, 6, 1))
"""The last sequence has empty spans, and nothing in its cache before."""
SPANS = 2
WORKERS = 5


@lru_cache(maxsize=16)
def case_of(model: str, tp: int = 1, *, interleaved: bool = False, batch: Batch = BATCH) -> Case:
    """A preset with weights from seed 0, or a model that is made here."""
    passes = decode_pipeline(tp, SPANS, BLOCK, interleaved)
    if model in _MADE:
        return prepare(_MADE[model](), passes, batch)
    return prepare(model, passes, batch, random_weights=0)


@lru_cache(maxsize=32)
def lowered_of(model: str, tp: int, lowering: str = "heads", **options: Any) -> Lowered:
    """Its program, in pieces so small that every worker has some."""
    case = case_of(model, tp, **options)
    return lower(case.graph, replace(plan_for(case, WORKERS, lowering), grain=4))


def in_order(lowered: Lowered) -> Program:
    """One instruction after the other, as they are meant: a schedule does not change a bit."""
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
    """On all projections of attention, the row-parallel one too."""
    return tiny("qwen3", attention_bias=True)


def _with_a_tie() -> Any:
    """Two tokens have the same row in the table, and it is the best one of the first sequence."""
    model = tiny("qwen3")
    (taken,) = case_of(QWEN3).taken
    best = int(taken.step.eager.values[TOKEN][0])
    read = set(torch.cat(taken.texts.tokens).tolist())
    table = model.get_input_embeddings().weight
    other = next(n for n in range(len(table) - 1, best, -1) if n not in read)
    with torch.no_grad():
        table[other] = table[best]
    return model


def tiny(kind: str, **changes: Any) -> Any:
    """A tiny preset in eager with another configuration, and weights from seed 0."""
    return copy.deepcopy(_tiny(kind, **changes))


@lru_cache(maxsize=8)
def _tiny(kind: str, **changes: Any) -> Any:
    return pair_of(AutoConfig.for_model(**{**preset(f"tiny-{kind}"), **changes})).eager


_MADE = {"qwen3 with biases": _with_biases, "qwen3 with a tie": _with_a_tie}
