"""Pass `shard-linears`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.errors import PassError
from tpcompile.ir.info import info_of
from tpcompile.ir.layout import FusedLayout, Layout
from tpcompile.ir.meta import parameter_of, placement_of, set_parameter, value_type
from tpcompile.ir.ops import REDISTRIBUTE, arguments_of
from tpcompile.ir.plan import EXPERT_AXIS, HeadPlan, Plan
from tpcompile.ir.types import REPLICATE
from tpcompile.ir.values.build import BIAS_AFTER_SUM
from tpcompile.ir.values.scope import Rewrite
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.rewriting.rewrite import Report, insert_after, replace
from tpcompile.rewriting.structure import (
    DeltaBlock,
    ExpertBlock,
    attention_blocks,
    bias_of,
    delta_blocks,
    expert_blocks,
    mlp_blocks,
    weight_of,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class ShardLinears:
    """Shard mixers and MLPs: column-parallel linears at the input, row-parallel at the output.

    %q = linear(%n, %wq)                  %q = linear(%n, %wq)    wq Shard(0, q_heads)
    %a = attention(%q, %k, %v, …)         %a = attention(%q, %k, %v, …)
    %o = linear(%a, %wo, %bias)      →    %o = linear(%a, %wo)    wo Shard(1, q_heads)
                                          %r = redistribute(%o)
                                          %b = %r + %bias

    The channels of linear attention, their taps, and its gates follow its heads.
    """

    name: ClassVar[str] = "shard-linears"
    after: ClassVar[tuple[str, ...]] = ("plan-sharding",)
    before: ClassVar[tuple[str, ...]] = PlanSharding.before
    rewrites: ClassVar[tuple[Rewrite, ...]] = (BIAS_AFTER_SUM,)

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        plan = plan_of(gm)
        if plan.tp == 1:
            return report
        for block in attention_blocks(gm.graph):
            heads = plan.heads_of(block.attention).queries
            layout = heads.with_grain(value_type(block.attention).extent(-1))
            for projection in filter(None, (block.query, block.gate)):
                report.matches += split_rows(projection, layout)
            report.matches += split_columns(block.output, layout)
        for delta in delta_blocks(gm.graph):
            report.matches += _shard_delta(delta, plan.heads_of(delta.rule))
        mixtures = expert_blocks(gm.graph)
        shared = {mixture.shared for mixture in mixtures}
        for mlp in mlp_blocks(gm.graph):
            layout = plan.ffn_of(mlp.activated)
            for linear in (mlp.gate, mlp.up):
                report.matches += split_rows(linear, layout) if linear else 0
            report.matches += split_columns(mlp.down, layout, whole=mlp.down not in shared)
        for mixture in mixtures:
            report.matches += _shard_experts(mixture, plan.ffn_of(mixture.experts))
        return report


def _shard_experts(block: ExpertBlock, layout: Layout) -> int:
    """Give a rank whole experts, or some features of each; one sum joins all results."""
    arguments = arguments_of(block.experts)
    gate_up, down = arguments["gate_up"], arguments["down"]
    if placement_of(gate_up) != REPLICATE:
        return 0
    if layout.axis == EXPERT_AXIS:
        _shard(gate_up, 0, layout)
        _shard(down, 0, layout)
    else:
        _shard(gate_up, 1, FusedLayout((layout, layout)))
        _shard(down, 2, layout)
    _sum(block.total)
    return 2


def _shard_delta(block: DeltaBlock, heads: HeadPlan) -> int:
    """Shard linear attention by its value heads; keys, channels and gates follow them."""
    arguments = arguments_of(block.rule)
    widths = {name: value_type(arguments[name]).shape[-1] for name in "kv"}
    key, value = (
        layout.with_grain(int(widths[name]))
        for name, layout in (("k", heads.keys), ("v", heads.queries))
    )
    channels = FusedLayout((key, key, value))
    convolution, decay = arguments_of(block.conv), arguments_of(block.decay)
    for name, layout, owner in (
        ("weight", channels, convolution),
        ("bias", channels, convolution),
        ("rate", heads.queries, decay),
        ("bias", heads.queries, decay),
    ):
        parameter = owner[name]
        if parameter is not None and placement_of(parameter) == REPLICATE:
            _shard(parameter, 0, layout)
    matches = split_rows(block.inputs, channels) + split_rows(block.gate, value)
    matches += split_rows(block.a, heads.queries) + split_rows(block.beta, heads.queries)
    return matches + split_columns(block.output, value)


def _shard(parameter: fx.Node, dim: int, layout: Layout | FusedLayout) -> None:
    set_parameter(parameter, parameter_of(parameter).sharded(dim, layout))


def plan_of(gm: fx.GraphModule) -> Plan:
    """Return the plan that plan-sharding made."""
    plan = info_of(gm).plan
    if plan is None:
        raise PassError("The graph has no plan", hint="Put plan-sharding before this pass")
    assert isinstance(plan, Plan)
    return plan


def split_rows(linear: fx.Node, layout: Layout | FusedLayout) -> int:
    """Make a linear column-parallel: each rank computes some of the output features."""
    weight, bias = weight_of(linear), bias_of(linear)
    if placement_of(weight) != REPLICATE:
        return 0
    _shard(weight, 0, layout)
    if bias is not None:
        _shard(bias, 0, layout)
    return 1


def split_columns(linear: fx.Node, layout: Layout, *, whole: bool = True) -> int:
    """Make a linear row-parallel: each rank computes a partial sum; add the bias after the sum.

    Unless `whole`, a later node is summed.
    """
    weight, bias = weight_of(linear), bias_of(linear)
    if placement_of(weight) != REPLICATE:
        return 0
    _shard(weight, 1, layout)
    if whole:
        linear.args = (linear.args[0], weight)
        _sum(linear, bias)
    return 1


def _sum(terms: fx.Node, bias: fx.Node | None = None) -> None:
    """Insert the sum of the ranks' terms, then a bias, and round once."""
    readers = list(terms.users)
    dtype = value_type(terms).dtype
    total = insert_after(terms, REDISTRIBUTE, terms, *_sum_dtype(dtype))
    last = total if bias is None else insert_after(total, aten.add.Tensor, total, bias)
    last.meta["value"] = terms.meta.get("value")
    if bias is not None:
        terms.meta["value"] = None  # the captured value includes the bias
    for reader in readers:
        reader.replace_input_with(terms, last)
    if dtype != torch.float32:
        _round_after(last, readers, dtype)


def _sum_dtype(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return () if dtype == torch.float32 else (torch.float32,)


def _round_after(total: fx.Node, readers: list[fx.Node], dtype: torch.dtype) -> None:
    """Round a sum in fp32: after the residual addition if that is a reader, else directly."""
    for reader in readers:
        if reader.target is aten.add.Tensor:
            replace(reader, insert_after(reader, aten.to.dtype, reader, dtype))
        else:
            rounded = insert_after(total, aten.to.dtype, total, dtype)
            reader.replace_input_with(total, rounded)
