"""Mistakes in the sharding of experts, put back one by one: the checker refuses each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import fx

from tests.models import TOLERANCE, batch, eager_logits, preset_pair, relative_error, stage_logits
from tests.passes.steps import TINY_VOCABULARY
from tests.stages import graph_after, until
from tpcompile.ir.checker import check_graph
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import operand, parameter_of, set_parameter
from tpcompile.ir.ops import TOP_EXPERTS, arguments_of
from tpcompile.ir.plan import EXPERT_AXIS
from tpcompile.ir.recipe import Recipe, concat, shape_of, take
from tpcompile.options import passes_for
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import expert_blocks, weight_of

LENGTHS = (3, 1, 4)
MODEL = "tiny-qwen3.5-moe"
TP = 3


@lru_cache
def sharded(experts: str) -> fx.GraphModule:
    passes = until(passes_for(None, TP, experts=experts), "shard-linears")
    return graph_after(preset_pair(MODEL), passes)


@lru_cache
def expected() -> torch.Tensor:
    return eager_logits(preset_pair(MODEL).eager, LENGTHS)


def _changed(gm: fx.GraphModule, name: str, change: Callable[[Recipe, int], Recipe]) -> None:
    """Change the recipe of a weight of experts on each rank."""
    node = arguments_of(expert_blocks(gm.graph)[0].experts)[name]
    parameter = parameter_of(node)
    shards = tuple(change(recipe, rank) for rank, recipe in enumerate(parameter.shards))
    set_parameter(node, dataclasses.replace(parameter, shards=shards))


def _next(recipe: Recipe) -> Recipe:
    """Give each expert of a rank the weights of the next one."""
    count = shape_of(recipe)[0]
    return concat([take(recipe, 0, 1, count), take(recipe, 0, 0, 1)], 0)


def _another_order(gm: fx.GraphModule) -> None:
    for name in ("gate_up", "down"):
        _changed(gm, name, lambda recipe, rank: _next(recipe))


def _another_order_everywhere(gm: fx.GraphModule) -> None:
    """Put the whole weight too in another order, so that its parts agree with it."""
    block = expert_blocks(gm.graph)[0]
    for name in ("gate_up", "down"):
        _changed(gm, name, lambda recipe, rank: _next(recipe))
        node = arguments_of(block.experts)[name]
        parameter = parameter_of(node)
        set_parameter(node, dataclasses.replace(parameter, whole=_next(parameter.whole)))


def _down_of_another(gm: fx.GraphModule) -> None:
    _changed(gm, "down", lambda recipe, rank: _next(recipe))


def _up_of_another(gm: fx.GraphModule) -> None:
    def change(recipe: Recipe, rank: int) -> Recipe:
        rows = shape_of(recipe)[1]
        gate, up = take(recipe, 1, 0, rows // 2), take(recipe, 1, rows // 2, rows)
        return concat([gate, _next(up)], 1)

    _changed(gm, "gate_up", change)


def _up_before_gate(gm: fx.GraphModule) -> None:
    def change(recipe: Recipe, rank: int) -> Recipe:
        rows = shape_of(recipe)[1]
        return concat([take(recipe, 1, rows // 2, rows), take(recipe, 1, 0, rows // 2)], 1)

    _changed(gm, "gate_up", change)


def _twice_instead_of_another(gm: fx.GraphModule) -> None:
    """Rank 0 has its second expert also in place of the first, which no rank has."""

    def change(recipe: Recipe, rank: int) -> Recipe:
        second = take(recipe, 0, 1, 2)
        tail = take(recipe, 0, 1, shape_of(recipe)[0])
        return recipe if rank else concat([second, tail], 0)

    for name in ("gate_up", "down"):
        _changed(gm, name, change)


def _placed(gm: fx.GraphModule, *runs: tuple[int, int]) -> None:
    """Give each rank one run of experts."""
    layout = Layout(EXPERT_AXIS, 8, 1, tuple((run,) for run in runs))
    arguments = arguments_of(expert_blocks(gm.graph)[0].experts)
    for node in (arguments["gate_up"], arguments["down"]):
        parameter = parameter_of(node).on_ranks(TP)
        set_parameter(node, parameter.sharded(0, layout))


def _shared_on_every_rank(gm: fx.GraphModule) -> None:
    shared = expert_blocks(gm.graph)[0].shared
    assert shared is not None
    for linear in (*operand(shared).all_input_nodes, shared):
        weight = weight_of(linear)
        set_parameter(weight, parameter_of(weight).on_ranks(TP))


MISTAKES: dict[str, tuple[str, Callable[[fx.GraphModule], None]]] = {
    "split experts in another order": ("tp", _another_order),
    "whole experts in another order": ("ep", _another_order),
    "the order of the whole weight": ("ep", _another_order_everywhere),
    "up of another expert": ("tp", _up_of_another),
    "up of another whole expert": ("ep", _up_of_another),
    "down of another expert": ("tp", _down_of_another),
    "up before gate": ("tp", _up_before_gate),
    "one expert in place of another": ("ep", _twice_instead_of_another),
    "an expert missing on all ranks": ("ep", lambda gm: _placed(gm, (1, 3), (3, 6), (6, 8))),
    "an expert on two ranks": ("ep", lambda gm: _placed(gm, (0, 3), (2, 6), (6, 8))),
    "the shared expert on every rank": ("tp", _shared_on_every_rank),
    "the shared expert beside whole ones": ("ep", _shared_on_every_rank),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_checker_refuses_a_mistake(name: str) -> None:
    experts, put_back = MISTAKES[name]
    gm = clone(sharded(experts))
    assert check_graph(gm) == []
    put_back(gm)
    assert check_graph(gm)


def _error(gm: fx.GraphModule) -> float:
    logits = stage_logits(gm, preset_pair(MODEL), batch(LENGTHS, TINY_VOCABULARY))
    return relative_error(logits, expected())


SAME_SHAPES = [name for name in MISTAKES if " on " not in name and "beside" not in name]


@pytest.mark.parametrize("name", SAME_SHAPES)
def test_a_mistake_changes_the_numbers(name: str) -> None:
    experts, put_back = MISTAKES[name]
    gm = clone(sharded(experts))
    put_back(gm)
    assert _error(gm) > 100 * TOLERANCE


@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_scores_that_are_not_normalised_change_the_numbers(experts: str) -> None:
    """The graph is what the model computes, so only a comparison with eager can tell."""
    gm = clone(sharded(experts))
    assert _error(gm) < TOLERANCE
    for choice in calls(gm, TOP_EXPERTS):
        assert choice.args[2] is True
        choice.args = (*choice.args[:2], False)
    assert _error(gm) > 100 * TOLERANCE
