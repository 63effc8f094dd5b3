"""Tests of emitted modules: their source is readable, and is what runs on ranks in threads."""

from __future__ import annotations

import ast
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.models import TOLERANCE, batch, preset_pair, relative_error, run, stage_logits
from tests.stages import graph_after
from tpcompile.backends.native import functions as native_functions
from tpcompile.backends.torch_tp import Router, emit_sources, functions, load_rank, run_simulated
from tpcompile.backends.torch_tp.matrix import as_matrix, experts, linear, linear_swiglu
from tpcompile.comm import SimulatedGroup
from tpcompile.errors import RankError, UnsupportedError
from tpcompile.ir.meta import OUTPUTS
from tpcompile.ir.ops import SPECS, SWIGLU
from tpcompile.ir.ops.argmax import local_argmax
from tpcompile.ir.ops.few_bits import DecodedExperts, decoded, decoded_rows
from tpcompile.ir.simulate import materialise, rank_inputs
from tpcompile.passes import default_pipeline, parse_pipeline
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import output_of


def _modules(name: str, passes: list[Any]) -> tuple[list[nn.Module], SimulatedGroup, Any]:
    pair = preset_pair(name)
    gm = graph_after(pair, passes)
    ranks = gm.meta["tpcompile"].tp
    weights = materialise(gm, pair.read)
    group = SimulatedGroup(ranks)
    modules = [
        load_rank(
            source,
            rank,
            {name: parts[rank] for name, parts in weights.items()},
            pair.captured.rotary.fresh(),
            group.rank(rank),
        )
        for rank, source in enumerate(emit_sources(gm))
    ]
    return modules, group, gm


@pytest.mark.parametrize("tp", [1, 3, 4])
def test_source_golden(tp: int, golden: Any) -> None:
    gm = graph_after(preset_pair("tiny-qwen3"), default_pipeline(tp))
    golden(f"torch_tp/tiny-qwen3-tp{tp}-rank0.py.txt", emit_sources(gm)[0])


def test_layers_of_two_kinds_have_a_class_each(golden: Any) -> None:
    """Layers are numbered among those with states of their kind."""
    gm = graph_after(preset_pair("tiny-qwen3.5"), default_pipeline(4))
    source = emit_sources(gm)[0]
    golden("torch_tp/tiny-qwen3.5-tp4-rank0.py.txt", source)
    assert "Layer3(3, 0, parameters, group)" in source
    assert source.count("self.kept = kept") == source.count("class Layer")


def test_only_a_swiglu_of_both_halves_is_one_call_with_its_linear() -> None:
    gm = graph_after(preset_pair("tiny-qwen3"), default_pipeline(2))
    first, second = calls(gm, SWIGLU)
    first.args = first.args[::-1]
    with gm.graph.inserting_after(second):
        reader = gm.graph.call_function(SWIGLU, (second.args[0], second.args[0]), name="reader")
    reader.meta.update(second.meta)
    lines = [line for line in emit_sources(gm)[0].splitlines() if "swiglu(" in line]
    assert [line.split("  #")[0].strip() for line in lines] == [
        "swiglu = tpc.swiglu(up_proj, gate_proj)",
        "swiglu = tpc.swiglu(gate_proj, up_proj)",
        "reader = tpc.swiglu(gate_proj, gate_proj)",
    ]


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3", "tiny-qwen3.5"])
def test_emitted_modules_give_the_bits_of_the_graph(name: str, tp: int) -> None:
    """The graph on simulated ranks and the source emitted from it give identical bits.

    The caches are identical too, whichever output is requested.
    """
    modules, group, gm = _modules(name, default_pipeline(tp))
    packed = batch((1, 33, 7))
    values = run(gm, preset_pair(name), packed)
    caches = values[next(node for node in gm.graph.nodes if node.name == "cache")]
    for place, output in enumerate(OUTPUTS):
        inputs = rank_inputs(gm, packed.inputs())
        requests = [{**options, "output": output} for options in inputs]
        for rank, actual in enumerate(run_simulated(modules, group, requests)):
            assert torch.equal(actual, values[output_of(gm.graph)][rank][place])
            cache = inputs[rank]["cache"]
            assert torch.equal(cache.nan_to_num(), caches[rank].nan_to_num())
        if output == OUTPUTS[0]:
            actual = run_simulated(modules, group, rank_inputs(gm, packed.inputs()))[0]
            assert torch.equal(actual, values[output_of(gm.graph)][0][0]), "default output"


class _Counting:
    """Group proxy that records which operations are called."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.asked = inner, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize(("output", "last"), [("logits", "all_gather"), ("tokens", "argmax")])
def test_only_the_result_that_is_wanted_is_computed(output: str, last: str) -> None:
    modules, group, gm = _modules("tiny-qwen3", default_pipeline(3))
    ranks = [_Counting(module.group) for module in modules]
    for module, rank in zip(modules, ranks, strict=True):
        for part in (module, *module.layers):
            part.group = rank
    inputs = rank_inputs(gm, batch((3, 2)).inputs())
    run_simulated(modules, group, [{**options, "output": output} for options in inputs])
    for rank in ranks:
        assert rank.asked == ["all_reduce"] * 5 + [last]


def test_a_graph_with_one_result_is_not_asked_which() -> None:
    passes = [current for current in default_pipeline(2) if current.name != "greedy-head"]
    modules, group, gm = _modules("tiny-qwen3", passes)
    assert "output" not in emit_sources(gm)[0]
    packed = batch((3, 2))
    actual = run_simulated(modules, group, rank_inputs(gm, packed.inputs()))[0]
    assert torch.equal(actual, stage_logits(gm, preset_pair("tiny-qwen3"), packed))


def test_a_result_that_the_other_is_made_of_is_computed_once() -> None:
    """On one rank the tokens are computed from the logits without a second linear."""
    _, _, gm = _modules("tiny-qwen3", default_pipeline(1))
    source = emit_sources(gm)[0]
    assert len([line for line in source.splitlines() if "linear(normed, " in line]) == 1


def test_any_stage_behind_the_collectives_can_be_emitted() -> None:
    pair = preset_pair("tiny-qwen3")
    packed = batch((5, 12))
    raw = stage_logits(pair.captured.graph, pair, packed)
    for text in ("canonicalize", "canonicalize,raise-norm,raise-rope"):
        modules, group, gm = _modules("tiny-qwen3", parse_pipeline(text))
        inputs = rank_inputs(gm, packed.inputs())
        assert relative_error(run_simulated(modules, group, inputs)[0], raw) < TOLERANCE


def test_a_wish_for_a_whole_value_has_no_form_in_torch() -> None:
    names = [current.name for current in default_pipeline(2)]
    stop = names.index("insert-collectives")
    gm = graph_after(preset_pair("tiny-qwen3"), default_pipeline(2)[:stop])
    with pytest.raises(UnsupportedError, match="insert-collectives"):
        emit_sources(gm)


def test_source_calls_functions_and_no_custom_ops() -> None:
    gm = graph_after(preset_pair("tiny-qwen3"), default_pipeline(2))
    source = emit_sources(gm)[1]
    ast.parse(source)
    assert "torch.ops" not in source
    assert max(map(len, source.split("\n"))) < 200


def test_every_function_that_source_calls_is_a_reference() -> None:
    named = {spec.name.removeprefix("tpc."): spec.reference for spec in SPECS.values()}
    named["local_argmax"] = local_argmax  # a rank's part of argmax
    named |= {"linear": linear, "as_matrix": as_matrix}  # torch's, with another weight layout
    named["linear_swiglu"] = linear_swiglu  # two calls of the graph
    named |= {"decoded": decoded, "decoded_rows": decoded_rows}  # the values of a weight
    named |= {"DecodedExperts": DecodedExperts, "experts": experts}  # with torch's linears
    named["Router"] = Router  # a module that calls top_experts
    named |= {name: getattr(functional, name) for name in ("gelu", "silu", "softplus")}  # torch's
    named["sigmoid"] = torch.sigmoid
    for name in functions.__all__:
        assert getattr(functions, name) is named[name]


def test_the_native_backend_has_the_same_functions() -> None:
    for name in functions.__all__:
        assert callable(getattr(native_functions, name))


def test_a_parameter_of_the_wrong_shape_is_refused() -> None:
    pair = preset_pair("tiny-qwen3")
    gm = graph_after(pair, default_pipeline(2))
    weights = {name: parts[0] for name, parts in materialise(gm, pair.read).items()}
    weights["norm_weight"] = weights["norm_weight"][:-1]
    with pytest.raises(AssertionError, match="norm_weight"):
        load_rank(emit_sources(gm)[0], 0, weights, nn.Identity(), SimulatedGroup(2).rank(0))


class _Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("this rank fails")


class _Waiting(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.group.all_reduce(x)
        return result


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_does_not_leave_the_others_waiting(failing: int) -> None:
    group = SimulatedGroup(3)
    modules = [_Failing() if rank == failing else _Waiting(group.rank(rank)) for rank in range(3)]
    before = threading.active_count()
    with pytest.raises(RankError, match="this rank fails"):
        run_simulated(modules, group, [{"x": torch.ones(2)}] * 3)
    assert threading.active_count() == before


def test_ranks_run_again_after_a_failure() -> None:
    group = SimulatedGroup(2)
    waiting = [_Waiting(group.rank(rank)) for rank in range(2)]
    with pytest.raises(RankError, match="this rank fails"):
        run_simulated([_Failing(), waiting[1]], group, [{"x": torch.ones(2)}] * 2)
    results = run_simulated(waiting, group, [{"x": torch.ones(2)}] * 2)
    assert all(torch.equal(result, torch.full((2,), 2.0)) for result in results)


def test_parts_that_are_not_as_wide_as_planned_are_refused() -> None:
    class Gather(_Waiting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.group.all_gather(x, 0, (2, 3))
            return result

    group = SimulatedGroup(2)
    with pytest.raises(RankError, match=r"must be \[2, 3\]"):
        run_simulated([Gather(group.rank(r)) for r in range(2)], group, [{"x": torch.ones(2)}] * 2)


def test_two_callers_take_turns() -> None:
    """Two user threads can call the same model; collectives never mix their runs."""
    modules, group, gm = _modules("tiny-qwen3", default_pipeline(3))
    batches = [batch((3, 9), seed=seed) for seed in range(6)]
    expected = [stage_logits(gm, preset_pair("tiny-qwen3"), packed) for packed in batches]
    logits: list[Any] = [None] * len(batches)

    def call(number: int) -> None:
        packed = batches[number]
        inputs = rank_inputs(gm, packed.inputs())
        logits[number] = run_simulated(modules, group, inputs)[0]

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(batches))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))


def test_layers_with_experts_choose_them_by_a_module() -> None:
    pair = preset_pair("tiny-qwen3-moe")
    (source,) = emit_sources(graph_after(pair, default_pipeline(1)))
    layers = source.count("\nclass Layer")
    assert source.count("self.router = tpc.Router()") == source.count("= self.router(") == layers
    (dense,) = emit_sources(graph_after(preset_pair("tiny-qwen3"), default_pipeline(1)))
    assert "router" not in dense
