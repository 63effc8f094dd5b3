"""Observing Hugging Face's model changes neither its results nor its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.compare.program.cases import BLOCK, HYBRID, case_of, tiny
from tpcompile.compare.program import Batch, prepare
from tpcompile.compare.program import eager as eager_side
from tpcompile.compare.program.eager import Eager, Spot, spots
from tpcompile.errors import UnsupportedError
from tpcompile.ir.meta import Origin
from tpcompile.ir.roles import Run
from tpcompile.passes.pipeline import decode_pipeline

PASSES = decode_pipeline(1, 1, BLOCK)


def hooks_of(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("setting", ["eager", "sdpa"])
def test_it_is_left_as_it_was(setting: str) -> None:
    model = tiny("qwen3")
    model.set_attn_implementation(setting)
    known = dict(ALL_ATTENTION_FUNCTIONS)
    prepare(model, PASSES, Batch((3,)))
    assert hooks_of(model) == 0
    assert dict(ALL_ATTENTION_FUNCTIONS) == known
    assert model.config._attn_implementation == setting


def test_it_is_left_as_it_was_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    known = dict(ALL_ATTENTION_FUNCTIONS)

    def failing(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no attention today")

    monkeypatch.setattr(eager_side._Watch, "put_attention", failing)
    with pytest.raises(RuntimeError, match="no attention today"):
        prepare(model, PASSES, Batch((3,)))
    assert hooks_of(model) == 0
    assert dict(ALL_ATTENTION_FUNCTIONS) == known


def test_an_attention_function_of_the_users_own_is_the_one_that_runs() -> None:
    """A user-defined attention function registered in this process runs, and stays registered."""
    model = tiny("qwen3")
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    layers = []

    def own(*args: Any, **options: Any) -> Any:
        layers.append(args[0].layer_idx)
        return plain(*args, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    try:
        model.set_attn_implementation("sdpa")
        prepare(model, PASSES, Batch((3,)))
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert layers == [0, 1] * 2  # once for the prompt, once for the step


def test_what_it_is_asked_in_pieces_is_what_it_says_at_once() -> None:
    """Prefill and step give the logits of a single forward pass, so the caches are correct."""
    case = case_of("preset:tiny-qwen3", batch=Batch((9, 6, 1), 2))
    model = tiny("qwen3")
    for case_step in case.steps:
        for row, text in enumerate(case_step.texts.tokens):
            with torch.inference_mode():
                whole = model(text[None]).logits[0, -1]
            assert torch.allclose(
                case_step.step.eager.values["logits", None][row], whole, atol=1e-6
            )


def test_residuals_are_what_norms_are_given() -> None:
    value_spots = spots(case_of("preset:tiny-qwen3").structure)
    assert value_spots["mlp_residual", 1] == (Spot("model.norm", is_input=True),)
    assert value_spots["norm", 1] == (Spot("model.layers.1.input_layernorm"),)
    assert value_spots["swiglu", 0] == (Spot("model.layers.0.mlp.down_proj", is_input=True),)


def test_values_of_gated_attention_and_linear_attention() -> None:
    """A projection may compute two values per head, and a value may come from two projections."""
    value_spots = spots(case_of(HYBRID, 2).structure)
    queries, gates = (Run(96, 16, first, 32) for first in (0, 16))
    projection = "model.layers.1.self_attn.q_proj"
    assert value_spots["q", 1] == (Spot(projection, run=queries),)
    assert value_spots["attention_gate", 1] == (Spot(projection, run=gates),)
    assert value_spots["k", 1] == (Spot("model.layers.1.self_attn.k_proj"),)
    assert value_spots["attention", 1] == (Spot("model.layers.1.self_attn.o_proj", is_input=True),)
    net = "model.layers.2.linear_attn"
    assert value_spots["projected", 2] == (
        Spot(f"{net}.in_proj_qkv", columns=(0, 192)),
        Spot(f"{net}.in_proj_z", columns=(192, 288)),
    )
    assert value_spots["gates", 2] == (
        Spot(f"{net}.in_proj_b", columns=(0, 6)),
        Spot(f"{net}.in_proj_a", columns=(6, 12)),
    )
    assert value_spots["mixed", 2] == (Spot(f"{net}.out_proj", is_input=True),)


def test_a_part_of_each_head() -> None:
    values = torch.arange(12.0).view(1, 1, 12)
    spot = Spot("", run=Run(6, 2, 1, 4))
    assert spot.part(values).tolist() == [[1.0, 2.0, 5.0, 6.0, 9.0, 10.0]]
    assert Spot("").part(values).shape == (1, 12)


@pytest.mark.parametrize("own_forward", [False, True], ids=["of its class", "its own"])
def test_linear_attention_is_left_as_it_was(
    own_forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer has the forward that it had, also if the step fails."""
    model = tiny("qwen3.5")
    net = model.model.layers[1].linear_attn
    if own_forward:
        net.forward = net.forward
    before = dict(vars(net))
    prepare(model, PASSES, Batch((3,)))
    assert vars(net) == before

    def failing(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no attention today")

    monkeypatch.setattr(eager_side._Watch, "put_attention", failing)
    with pytest.raises(RuntimeError, match="no attention today"):
        prepare(model, PASSES, Batch((3,)))
    assert vars(net) == before


def test_a_value_of_no_module_is_refused() -> None:
    structure = case_of("preset:tiny-qwen3", 2).structure
    node = structure.layers[0].nodes["q"]
    origin, node.meta["origin"] = node.meta["origin"], Origin()
    try:
        with pytest.raises(UnsupportedError, match="does not come from a module of the model"):
            spots(structure)
    finally:
        node.meta["origin"] = origin


def test_a_model_without_such_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    structure = case_of("preset:tiny-qwen3").structure
    monkeypatch.setattr(type(model), "__module__", "torch")
    with pytest.raises(UnsupportedError, match="no attention function"):
        eager_side._modules_own(model)
    assert Eager(model, structure)
