"""Pass `plan-sharding`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.dtypes import EXPERTS
from tpcompile.errors import ShardingError, UsageError, did_you_mean
from tpcompile.ir.info import info_of, model_of
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import (
    operand,
    origin_of,
    parameter_of,
    parameters,
    set_parameter,
    value_type,
)
from tpcompile.ir.ops import arguments_of
from tpcompile.ir.plan import (
    LINEAR_HEADS,
    HeadPlan,
    Plan,
    choose_experts,
    expert_plans,
    plan_axis,
    plan_heads,
)
from tpcompile.rewriting.rewrite import Report
from tpcompile.rewriting.structure import (
    attention_blocks,
    delta_blocks,
    embedding_of,
    expert_blocks,
    head_of,
    mlp_blocks,
    weight_of,
)


def check_experts(experts: str) -> None:
    """Raise unless `experts` is a way to shard experts."""
    if experts not in EXPERTS:
        raise UsageError(
            f"experts must be one of {', '.join(EXPERTS)}, got {experts!r}",
            hint=did_you_mean(str(experts), EXPERTS),
        )


@dataclass(frozen=True)
class PlanSharding:
    """Choose layouts for `tp` ranks; every parameter is still replicated.

    %w = param(q.weight) : f32[96, 64] Replicate     (unchanged; the plan is stored with the graph)
    """

    name: ClassVar[str] = "plan-sharding"
    after: ClassVar[tuple[str, ...]] = (
        "canonicalize",
        "raise-norm",
        "raise-rope",
        "raise-attention",
        "raise-gates",
        "raise-experts",
    )
    before: ClassVar[tuple[str, ...]] = (
        "fuse-qkv",
        "fuse-gate-up",
        "fuse-experts",
        "select-rows",
        "cache-kv",
        "fuse-norm-qkv",
        "fuse-norm-gate-up",
        "fuse-norm-linear",
        "fuse-residual",
    )
    tp: int = 0
    """Number of ranks; 0 means the tp of the compilation, or 1."""
    ffn_grain: int = 0
    """Split the MLP in multiples of this; 0 chooses a grain."""
    experts: str = "auto"
    """The sharding of experts: `tp` splits each of them, `ep` gives ranks whole ones, and `auto`
    chooses the plan whose busiest rank is expected to read fewer bytes of experts for a token."""
    vocab_grain: int = 0
    """Split the vocabulary in multiples of this; 0 chooses a grain."""

    def apply(self, gm: fx.GraphModule) -> Report:
        info = info_of(gm)
        tp = self.tp or 1
        if tp < 1:
            raise UsageError(f"tp must be a positive int, got {tp}")
        mixtures = expert_blocks(gm.graph)
        check_experts(self.experts)
        if self.experts != "auto" and not mixtures:
            raise UsageError(
                f"experts={self.experts!r} requires a mixture of experts, "
                f"but {model_of(gm.graph)} has none",
                hint="Leave out the option",
            )
        info.tp = tp
        heads = {b.attention.name: _heads(b.attention, tp) for b in attention_blocks(gm.graph)}
        heads |= {b.rule.name: _linear_heads(b.rule, tp) for b in delta_blocks(gm.graph)}
        ffn = {
            mlp.activated.name: plan_axis(
                "ffn",
                value_type(mlp.activated).extent(-1),
                tp,
                self.ffn_grain or None,
                least=value_type(weight_of(mlp.down)).stored.grain,
            )
            for mlp in mlp_blocks(gm.graph)
        }
        ffn |= {block.experts.name: _experts(block.experts, tp, self.experts) for block in mixtures}
        for plans, noun in ((heads, "attention"), (ffn, "MLP")):
            if tp > 1 and not plans:
                raise ShardingError(
                    f"The graph has no {noun} to split over {tp} ranks",
                    hint="Put plan-sharding after raise-swiglu and raise-attention",
                )
        head_of(gm.graph)
        rows = value_type(operand(embedding_of(gm.graph))).extent(0)
        info.plan = Plan(tp, heads, ffn, plan_axis("vocab", rows, tp, self.vocab_grain or None))
        for node in parameters(gm.graph):
            whole = parameter_of(node)
            if len(whole.shards) != tp:
                set_parameter(node, whole.on_ranks(tp))
        return Report(matches=len(heads) + len(ffn) + 1)


def _heads(attention: fx.Node, tp: int) -> HeadPlan:
    queries, keys = (value_type(operand(attention, place)).extent(-2) for place in (0, 1))
    return plan_heads(queries, keys, tp)


def _linear_heads(rule: fx.Node, tp: int) -> HeadPlan:
    arguments = arguments_of(rule)
    values, keys = (value_type(arguments[name]).extent(-2) for name in "vk")
    return plan_heads(values, keys, tp, LINEAR_HEADS)


def _experts(node: fx.Node, tp: int, how: str) -> Layout:
    arguments = arguments_of(node)
    down = value_type(arguments["down"])
    count, features = down.extent(0), down.extent(2)
    chosen = value_type(arguments["ids"]).extent(-1)
    plans = expert_plans(count, features, chosen, tp, down.stored.grain)
    if not plans or (how != "auto" and how not in plans):
        raise ShardingError(
            f"The {count} experts of {features} features cannot be sharded over {tp} ranks",
            where=str(origin_of(node)),
            got=f"experts={how!r}",
            expected=f"a tp of at most {max(count, features // down.stored.grain)}, with the plan "
            "that fits",
        )
    return choose_experts(plans, how)
