"""Mistakes of a newcomer in copies of real passes, and what the messages say of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from tests.captures import captured_once
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import operand, parameter_of, parameters, set_parameter
from tpcompile.ir.ops import ADD_RMS_NORM, ATTENTION, RMS_NORM, ROPE
from tpcompile.passes import Report, parse_pipeline, run_passes
from tpcompile.passes.fuse_add_norm import FuseAddNorm
from tpcompile.passes.pipeline import for_ranks
from tpcompile.passes.raise_attention import RaiseAttention
from tpcompile.passes.raise_norm import RaiseNorm
from tpcompile.passes.raise_rope import RaiseRope
from tpcompile.passes.shard_linears import ShardLinears
from tpcompile.presets import preset
from tpcompile.rewriting.manager import FailedPassError, Pass
from tpcompile.rewriting.rewrite import calls, insert, insert_after

aten = torch.ops.aten


@dataclass(frozen=True)
class WrongDimension(ShardLinears):
    """Split the weight of the projection of attention by rows."""

    name: ClassVar[str] = "my-shard-linears"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = super().apply(gm)
        for node in parameters(gm.graph):
            if str(node.target).endswith("o_proj_weight"):
                layout = Layout("q_heads", 64, 1, (((0, 32),), ((32, 64),)))
                set_parameter(node, parameter_of(node).sharded(0, layout))
        return report


@dataclass(frozen=True)
class QueriesAlone(RaiseRope):
    """Leave out the rotation of keys."""

    name: ClassVar[str] = "my-raise-rope"
    rewrites: ClassVar[tuple[Any, ...]] = ()

    def apply(self, gm: fx.GraphModule) -> Report:
        report = super().apply(gm)
        for node in calls(gm, ROPE)[1::2]:
            node.replace_all_uses_with(operand(node))
            gm.graph.erase_node(node)
        return report


@dataclass(frozen=True)
class OtherEps(RaiseNorm):
    """Add another number to the mean square."""

    name: ClassVar[str] = "my-raise-norm"
    rewrites: ClassVar[tuple[Any, ...]] = ()

    def apply(self, gm: fx.GraphModule) -> Report:
        report = super().apply(gm)
        for node in calls(gm, RMS_NORM):
            node.update_arg(2, 1e-5)
        return report


@dataclass(frozen=True)
class ResidualTwice(FuseAddNorm):
    """Add the residual to the sum that already has it."""

    name: ClassVar[str] = "my-fuse-add-norm"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = super().apply(gm)
        for node in calls(gm, ADD_RMS_NORM)[:-1]:
            (item,) = (user for user in node.users if user.args[1] == 1)
            total = insert_after(item, aten.add.Tensor, item, node.args[1])
            item.replace_all_uses_with(
                total, delete_user_cb=lambda user, new=total: user is not new
            )
        return report


@dataclass(frozen=True)
class OtherOrder(RaiseAttention):
    """Flatten heads as if their elements came first."""

    name: ClassVar[str] = "my-raise-attention"
    rewrites: ClassVar[tuple[Any, ...]] = ()

    def apply(self, gm: fx.GraphModule) -> Report:
        report = super().apply(gm)
        for attention in calls(gm, ATTENTION):
            (flat,) = attention.users
            with gm.graph.inserting_before(flat):
                flat.update_arg(0, insert(flat, aten.transpose.int, attention, 1, 2))
        return report


@dataclass(frozen=True)
class OtherScale(RaiseAttention):
    """Scale the products of queries and keys by another number."""

    name: ClassVar[str] = "my-raise-attention"
    rewrites: ClassVar[tuple[Any, ...]] = ()

    def apply(self, gm: fx.GraphModule) -> Report:
        report = super().apply(gm)
        for attention in calls(gm, ATTENTION):
            attention.update_arg(4, 0.125)
        return report


@dataclass(frozen=True)
class OtherDtype(ShardLinears):
    """Round the weights of norms."""

    name: ClassVar[str] = "my-shard-linears"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = super().apply(gm)
        for node in parameters(gm.graph):
            if str(node.target).endswith("input_layernorm_weight"):
                weight = parameter_of(node)
                rounded = replace(weight.type, dtype=torch.bfloat16)
                set_parameter(node, replace(weight, type=rounded))
        return report


_NORMED = "mean(pow(%embedding[i, k], 2)))) · model.layers.0.input_layernorm.weight[j]"
_SUM = "rsqrt(1e-06 + mean(pow({}, 2)))) · model.layers.1.input_layernorm.weight[j]"
_KEY = "%l0_k_normed"
_ATTENTION = (
    "%l0_attention = attention(%l0_q_rotated[i, j, l], %l0_k_rotated[i, j, l], "
    "%l0_v_proj[i, 16j + l], %starts[i], scale={}, window=None)[i, j, l]"
)
_MISTAKES: dict[type[Pass], tuple[str, ...]] = {
    WrongDimension: (
        "shard-linears",
        "l0_o_proj",
        "input f32[T, 96] Shard(1, q_heads) (units 0:3 | 3:6) times "
        "weight f32[64, 96] Shard(0, q_heads) (whole)",
        "input features and weight columns with the same layout",
    ),
    QueriesAlone: (
        "raise-rope",
        "l0_k_normed_3",
        f"%l0_k_normed_3 = {_KEY}[j, i, l]",
        f"%l0_k_normed_3 = cat((%cos[j, l] · {_KEY}[j, i, l]) + "
        f"(%sin[j, l] · neg({_KEY}[j, i, l + 8])), (%cos[j, l + 8] · {_KEY}[j, i, l + 8]) + "
        f"({_KEY}[j, i, l] · %sin[j, l + 8]); l in 8, 8), as before the pass",
    ),
    OtherEps: (
        "raise-norm",
        "l0_input_normed",
        "1e-05",
        "1e-06, as before the pass",
        f"before the pass: %l0_input_normed = (%embedding[i, j] · rsqrt(1e-06 + {_NORMED}",
        f"after the pass:  %l0_input_normed = (%embedding[i, j] · rsqrt(1e-05 + {_NORMED}",
    ),
    ResidualTwice: (
        "fuse-add-norm",
        "l1_input_normed",
        "%l0_add[i, j]",
        "%l0_residual[i, j], as before the pass",
        "before the pass: %l1_input_normed = ((%l0_down_proj[i, j] + %l0_residual[i, j]) · "
        f"{_SUM.format('%l0_residual_1[i, k]')}",
        "after the pass:  %l1_input_normed = ((%l0_add[i, j] + %l0_down_proj[i, j]) · "
        f"{_SUM.format('…')}",
    ),
    OtherScale: (
        "raise-attention",
        "l0_attention",
        "scale=0.125",
        "scale=0.25, as before the pass",
        "before the pass: " + _ATTENTION.format(0.25),
        "after the pass:  " + _ATTENTION.format(0.125),
    ),
    OtherDtype: (
        "shard-linears",
        "l0_input_layernorm_weight",
        "model.layers.0.input_layernorm.weight[i] in bf16",
        "model.layers.0.input_layernorm.weight[i] in f32, as before the pass",
    ),
    OtherOrder: (
        "raise-attention",
        "l0_attention_flat",
        "%l0_attention_flat = %l0_attention[i, j%6, j/6]",
        "%l0_attention_flat = %l0_attention[i, j/16, j%16], as before the pass",
    ),
}
"""For each mistake the pass that it replaces, the node, what was found, what was expected, and both
expressions if these are parts of them."""


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_the_message_says_what_is_wrong(mistake: type[Pass]) -> None:
    from transformers import AutoConfig

    replaced, node, got, expected, *wholes = _MISTAKES[mistake]
    passes = for_ranks(parse_pipeline("standard"), 2)
    wrong = [mistake() if current.name == replaced else current for current in passes]
    captured = captured_once(AutoConfig.for_model(**preset("tiny-qwen3")), dtype=torch.float32)
    with pytest.raises(FailedPassError) as caught:
        run_passes(captured.graph, wrong)
    first = caught.value.problems[0]
    assert (first.node, first.got, first.expected) == (node, got, expected)
    assert list(first.details) == wholes
    assert caught.value.name == mistake.name
