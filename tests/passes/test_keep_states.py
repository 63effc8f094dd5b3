"""Linear attention resumes from states, which are inputs of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.models import TOLERANCE, eager_logits, padded, preset_pair, relative_error
from tests.passes.graphs import GraphBuilder, refusal
from tests.passes.steps import TINY_VOCABULARY, step
from tests.stages import graph_after
from tpcompile.errors import PassError
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import (
    CAUSAL_CONV,
    GATED_DELTA_RULE,
    PAGED_ATTENTION,
    RESUMED_CONV,
    RESUMED_DELTA_RULE,
    SPECS,
    arguments_of,
)
from tpcompile.ir.roles import StatesOf
from tpcompile.ir.simulate import logits_of, materialise, rank_inputs, run_ranks
from tpcompile.ir.types import ValueType
from tpcompile.passes import default_pipeline
from tpcompile.passes.keep_states import STATES, TAILS, KeepStates
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import calls

MODEL = "tiny-qwen3.5"


def test_matches_every_layer_of_linear_attention() -> None:
    gm = step("keep-states", MODEL).after.graph
    assert step("keep-states", MODEL).matches == 6
    assert not calls(gm, CAUSAL_CONV) and not calls(gm, GATED_DELTA_RULE)
    for op in (RESUMED_CONV, RESUMED_DELTA_RULE):
        assert [arguments_of(node)["layer"] for node in calls(gm, op)] == [0, 1, 2]
    assert [arguments_of(node)["layer"] for node in calls(gm, PAGED_ATTENTION)] == [0]
    assert step("keep-states", "tiny-qwen3").matches == 0


def _input(gm: fx.GraphModule, name: str) -> ValueType:
    return value_type(next(node for node in gm.graph.nodes if node.name == name))


@pytest.mark.parametrize("tp", [1, 4])
def test_states_are_laid_out_as_heads_and_channels_are(tp: int) -> None:
    gm = step("keep-states", MODEL, tp).after.graph
    rule, conv = (arguments_of(calls(gm, op)[0]) for op in (RESUMED_DELTA_RULE, RESUMED_CONV))
    states, tails = _input(gm, STATES), _input(gm, TAILS)
    assert (states.shape, states.dtype) == ((3, "K", 6, 16, 16), torch.float32)
    assert (tails.shape, tails.dtype) == ((3, "K", 3, 192), torch.float32)
    assert states.role == tails.role == StatesOf()
    assert states.layout_of(2) == value_type(rule["v"]).layout_of(1)
    assert tails.layout_of(3) == value_type(conv["x"]).layout_of(1)
    assert (states.layout_of(2) is None) == (tp == 1)
    inputs = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    assert inputs[4:] == ["slots", "tables", "lengths", STATES, TAILS, "read", "write", "cache"]
    assert check_graph(gm) == []


def _steps(gm: fx.GraphModule, pair: Any, pieces: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Return the logits of two sequences that come in pieces, and write alternate states."""
    lengths = tuple(map(sum, zip(*pieces, strict=True)))
    ids, mask = padded(lengths, TINY_VOCABULARY)
    rows = [row[real.bool()] for row, real in zip(ids, mask, strict=True)]
    gm = clone(gm)
    weights: dict[str, list[torch.Tensor]] = dict(materialise(gm, pair.read))
    dealt = rank_inputs(
        gm, {"input_ids": ids.flatten(), "starts": torch.tensor([0, *lengths]).cumsum(0)}
    )
    for node in list(gm.graph.nodes):
        if node.name in ("cache", STATES, TAILS):
            node.op = "get_attr"
            held = [arguments[node.name] for arguments in dealt]
            if node.name != "cache":  # two states for each sequence
                held = [torch.cat([state, state], 1) for state in held]
            weights[str(node.target)] = held
    tables, block = dealt[0]["tables"], 32
    done, logits = [0, 0], []
    for number, counts in enumerate(pieces):
        ends = [a + b for a, b in zip(done, counts, strict=True)]
        places = [torch.arange(a, b) for a, b in zip(done, ends, strict=True)]
        slots = [
            tables[row][place // block] * block + place % block for row, place in enumerate(places)
        ]
        swap = torch.tensor([2 * (number % 2), 2 * (number % 2)])
        inputs = {
            "input_ids": torch.cat([row[a:b] for row, a, b in zip(rows, done, ends, strict=True)]),
            "positions": torch.cat(places),
            "starts": torch.tensor([0, *counts]).cumsum(0),
            "logit_rows": torch.arange(sum(counts)),
            "slots": torch.cat(slots),
            "tables": tables,
            "lengths": torch.tensor(ends),
            "read": torch.arange(2) + 2 - swap,
            "write": torch.arange(2) + swap,
        }
        with torch.inference_mode():
            values = run_ranks(gm, inputs, weights, pair.captured.rotary.fresh())
        logits.append(logits_of(values)[0].split(counts))
        done = ends
    return torch.cat([torch.cat(side) for side in zip(*logits, strict=True)])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_step_by_step_gives_the_logits_of_the_whole(tp: int) -> None:
    pair = preset_pair(MODEL)
    gm = graph_after(pair, default_pipeline(tp))
    logits = _steps(gm, pair, ((5, 1), (1, 70), (1, 1), (3, 2)))
    expected = eager_logits(pair.eager, (10, 74))
    assert relative_error(logits, expected) < TOLERANCE


def test_the_state_of_another_layer_is_refused_and_wrong() -> None:
    pair = preset_pair(MODEL)
    gm = graph_after(pair, default_pipeline(2))
    pieces = ((5, 1), (1, 4))
    right = _steps(gm, pair, pieces)
    for op in (RESUMED_CONV, RESUMED_DELTA_RULE):
        wrong = clone(gm)
        first, second, third = calls(wrong, op)
        place = SPECS[op].argument_names.index("layer")
        second.update_arg(place, 0)
        (problem,) = check_graph(wrong)
        assert (problem.rule, problem.node) == ("states", second.name)
        assert f"layer 0 of the states, which %{first.name} writes too" in problem.got
        assert relative_error(_steps(wrong, pair, pieces), right) > 10 * TOLERANCE
        second.update_arg(place, 2)
        third.update_arg(place, 1)
        (problem,) = check_graph(wrong)
        assert "layer 1 of the states after layer 2" in problem.got


# Graphs whose linear attention cannot resume.


def two_rules(widths: tuple[int, int], *, lengths: bool = True) -> fx.GraphModule:
    """Return two gated delta rules with value heads of these widths."""
    builder = GraphBuilder()
    if lengths:
        builder.input("lengths", "N", dtype=torch.int64)
    starts = builder.input("starts", "S", dtype=torch.int64)
    q, k = (builder.input(name, "T", 2, 8) for name in "qk")
    gates = [builder.input(name, "T", 4) for name in ("decay", "beta")]
    results = []
    for layer, width in enumerate(widths):
        v = builder.input(f"v{layer}", "T", 4, width)
        results.append(builder.call(GATED_DELTA_RULE, q, k, v, *gates, starts, layer))
    return builder.done(builder.call(torch.ops.aten.cat.default, results, 2))


def test_layers_with_other_states_are_refused() -> None:
    message = refusal(KeepStates(), two_rules((8, 16)))
    assert "The states of %gated_delta_rule_1 must have the type of the states of" in message
    assert "f32[2, K, 4, 8, 16]" in message and "f32[2, K, 4, 8, 8]" in message


def test_lengths_come_from_the_cache() -> None:
    message = refusal(KeepStates(), two_rules((8, 8), lengths=False))
    assert "Put keep-states after cache-kv" in message
    with pytest.raises(PassError, match="without the lengths"):
        KeepStates().apply(two_rules((8, 8), lengths=False))


def test_a_graph_without_linear_attention_keeps_nothing() -> None:
    builder = GraphBuilder()
    gm = builder.done(builder.linear(builder.input("x", "T", 16), "w", 8, 16))
    assert KeepStates().apply(gm).matches == 0
    assert [node.name for node in gm.graph.nodes if node.op == "placeholder"] == ["x"]
