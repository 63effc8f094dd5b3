"""Traps 21 to 24: sizes that do not divide evenly, and exports of one token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.models import (
    TOLERANCE,
    pair_of,
    preset_pair,
)
from tests.traps.detection import (
    VISIBLE,
    assert_good,
    called,
    error_of,
    lowered,
    made_of,
    rules_broken,
)
from tpcompile.ir.checker import check_graph
from tpcompile.ir.layout import Layout, even_runs
from tpcompile.ir.meta import (
    Parameter,
    parameter_of,
    set_parameter,
    value_type,
)
from tpcompile.ir.ops import (
    RMS_NORM,
)
from tpcompile.ir.plan import plan_axis
from tpcompile.passes import run_passes
from tpcompile.presets import DENSE, preset

aten = torch.ops.aten


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("tp", range(2, 9))
def test_21_no_column_is_dropped(name: str, tp: int) -> None:
    """Each column of the real models' widths is on one rank; flooring would drop some."""
    values = preset(name)
    for size in (values["intermediate_size"], values["vocab_size"]):
        layout = plan_axis("axis", size, tp)
        assert layout.refusal() is None and layout.overlap() is None
        assert sum(layout.extent(rank) for rank in range(tp)) == size
        floored = tuple((((size // tp) * r, (size // tp) * (r + 1)),) for r in range(tp))
        refusal = Layout("axis", size, 1, floored).refusal()
        assert (refusal is None) == (size % tp == 0)
        assert refusal is None or f"({size % tp} missing)" in refusal


def test_21_floored_columns_in_a_graph() -> None:
    pair = preset_pair("tiny-qwen3")
    gm = lowered(pair, 3, "insert-collectives")
    assert_good(gm, pair)
    floored = Layout("ffn", 176, 1, tuple(((58 * r, 58 * (r + 1)),) for r in range(3)))
    for projection, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        weight = made_of(gm, f"layers.0.mlp.{projection}")
        whole = Parameter.replicated(parameter_of(weight).whole, torch.float32, 3)
        set_parameter(weight, whole.sharded(dim, floored))
    problems = check_graph(gm)
    assert [problem.rule for problem in problems] == ["layout"] * 3
    assert "174 (2 missing)" in problems[0].got
    assert error_of(gm, pair) > VISIBLE


@pytest.mark.parametrize("name", ["tiny-qwen3", "qwen3-0.6b"])
def test_22_attention_is_heads_times_width_wide(name: str) -> None:
    pair = preset_pair(name)
    config = pair.captured.config
    wide = config.num_attention_heads * config.head_dim
    assert wide != config.hidden_size
    gm = lowered(pair, 2)
    assert_good(gm, pair)
    weight = made_of(gm, "layers.0.self_attn.o_proj")
    assert value_type(weight).shape == (config.hidden_size, wide)
    layout = Layout("q_heads", config.hidden_size, 1, even_runs(config.hidden_size, 2))
    whole = parameter_of(weight).whole
    narrow = Parameter.replicated(whole, torch.float32, 2).sharded(1, layout)
    set_parameter(weight, narrow)
    assert "layout" in rules_broken(gm)


def odd_config(**changes: Any) -> Any:
    values = {**preset("tiny-qwen3"), "num_hidden_layers": 1, "num_attention_heads": 3}
    return AutoConfig.for_model(**{**values, "num_key_value_heads": 1, **changes})


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_23_heads_of_every_width(head_dim: int) -> None:
    pair = pair_of(odd_config(head_dim=head_dim, intermediate_size=91, vocab_size=211))
    for tp in (1, 2, 3):
        assert_good(lowered(pair, tp), pair)


def test_23_eps_from_the_config() -> None:
    pair = pair_of(odd_config(rms_norm_eps=1e-2))
    gm = lowered(pair, 2, "insert-collectives")
    assert_good(gm, pair)
    norms = called(gm, RMS_NORM)
    assert {norm.args[2] for norm in norms} == {1e-2}
    for norm in norms:
        norm.args = (*norm.args[:2], 1e-6)
    assert error_of(gm, pair) > VISIBLE


def test_24_an_export_of_one_token() -> None:
    """The captured graph supports any length; one specialised to length 1 is refused."""
    pair = preset_pair("tiny-qwen3")
    captured = pair.captured.graph
    inputs = [node for node in captured.graph.nodes if node.op == "placeholder"]
    assert value_type(inputs[0]).shape == ("T",)
    for lengths in ((1,), (2,), (33,), (1, 1)):
        assert error_of(captured, pair, lengths) < TOLERANCE
    gm, _ = run_passes(captured, [])
    extents = called(gm, aten.sym_size.int)
    assert extents, "captured views must use the symbolic number of tokens"
    for extent in extents:
        extent.replace_all_uses_with(1)  # type: ignore[arg-type]
    assert "view" in rules_broken(gm)
