"""Stages of pipelines on small models. Each is made once per process, from the stage before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import fx

from tests.models import Pair, batch, eager_logits, stage_logits
from tpcompile.ir.values.expressions import Expressions
from tpcompile.passes import Pass, Stage, run_passes
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.proving import Prover


def stages_of(pair: Pair, passes: Sequence[Pass]) -> list[Stage]:
    """Return what `run_passes` returns: the captured stage, and the stage after each pass.

    Callers may modify the graphs, which are copies.
    """
    return [_copy(_stage(pair, tuple(passes[:count]))) for count in range(len(passes) + 1)]


def graph_after(pair: Pair, passes: Sequence[Pass]) -> fx.GraphModule:
    """Return a copy of the graph after all passes."""
    return clone(_stage(pair, tuple(passes)).graph)


def until(passes: Sequence[Pass], name: str) -> list[Pass]:
    """Return the passes up to the one of this name, which is the last."""
    return list(passes[: [current.name for current in passes].index(name) + 1])


def after(passes: Sequence[Pass], name: str) -> list[Pass]:
    """Return the passes after the one of this name."""
    return list(passes[len(until(passes, name)) :])


@cache
def logits_after(
    pair: Pair, passes: tuple[Pass, ...], lengths: tuple[int, ...], vocabulary: int
) -> torch.Tensor:
    """Return the logits of a stage for sequences of random tokens."""
    return stage_logits(_stage(pair, passes).graph, pair, batch(lengths, vocabulary))


@cache
def eager_once(pair: Pair, lengths: tuple[int, ...]) -> torch.Tensor:
    """Return Hugging Face's logits for the same sequences."""
    return eager_logits(pair.eager, lengths)


@cache
def _stage(pair: Pair, passes: tuple[Pass, ...]) -> Stage:
    if not passes:
        return run_passes(pair.captured.graph, [])[1][0]
    *done, current = passes
    before = _stage(pair, tuple(done)).graph
    prover = Prover(_expressions(pair))
    graph, (_, stage) = run_passes(before, [current], done=done, prover=prover)
    return Stage(stage.name, stage.text_form, stage.stats, lambda: graph)


@cache
def _expressions(pair: Pair) -> Expressions:
    """Return the table of expressions that all stages of a model share, as in a pipeline."""
    return Expressions()


def _copy(stage: Stage) -> Stage:
    return Stage(stage.name, stage.text_form, stage.stats, lambda: clone(stage.graph))
