"""The plan: the layout of each logical axis, chosen once for one model and one tp."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

from torch import fx

from tpcompile.errors import PassError, ShardingError
from tpcompile.ir.layout import Layout, even_runs
from tpcompile.ir.meta import origin_of

_T = TypeVar("_T")

COARSEST_GRAIN = 128
RUNS_PER_RANK = 8
"""A grain above 1 is used only if each rank gets at least this many grains."""


@dataclass(frozen=True)
class HeadPlan:
    """The layouts of one mixer's heads: those that read, and those that they read.

    They are query and KV heads, or value and key heads of linear attention, in units of heads.
    """

    queries: Layout
    keys: Layout


@dataclass(frozen=True)
class Plan:
    """The layouts of heads, MLPs and experts, by the name of their mixer, activation or op node."""

    tp: int
    heads: dict[str, HeadPlan]
    ffn: dict[str, Layout]
    vocab: Layout

    def heads_of(self, mixer: fx.Node) -> HeadPlan:
        return self._layout_of(self.heads, mixer)

    def ffn_of(self, activated: fx.Node) -> Layout:
        return self._layout_of(self.ffn, activated)

    def _layout_of(self, layouts: dict[str, _T], node: fx.Node) -> _T:
        if node.name not in layouts:
            raise PassError(
                f"The plan has no layout for %{node.name}",
                where=str(origin_of(node)),
                hint="Put plan-sharding after the passes that raise attention and SwiGLU",
            )
        return layouts[node.name]


@dataclass(frozen=True)
class HeadAxes:
    """The axes of a mixer's heads, and the name of those that are split evenly."""

    queries: str
    keys: str
    name: str


ATTENTION_HEADS = HeadAxes("q_heads", "kv_heads", "query heads")
LINEAR_HEADS = HeadAxes("linear_v_heads", "linear_k_heads", "value heads of linear attention")
EXPERT_AXIS = "experts"
"""The axis of experts that are whole on a rank."""


def plan_heads(queries: int, keys: int, tp: int, axes: HeadAxes = ATTENTION_HEADS) -> HeadPlan:
    """Split query heads into even runs; each rank gets the KV heads that its query heads read."""
    if tp > queries:
        raise ShardingError(
            f"tp={tp} is more than the number of {axes.name}",
            got=f"{queries} {axes.name}",
            expected=f"a tp from 1 to {queries}",
            hint=f"Each rank must have at least one of the {axes.name}",
        )
    group = queries // keys
    runs = even_runs(queries, tp)
    read = tuple(((start // group, (stop - 1) // group + 1),) for ((start, stop),) in runs)
    return HeadPlan(Layout(axes.queries, queries, 1, runs), Layout(axes.keys, keys, 1, read))


def plan_axis(axis: str, size: int, tp: int, grain: int | None = None, least: int = 1) -> Layout:
    """Split an axis into one run per rank; the sizes differ by at most one grain.

    The default grain is the largest power of two, at most `COARSEST_GRAIN`, that divides the axis
    and gives each rank at least `RUNS_PER_RANK` grains, or else `least`. If that does not divide
    the axis, the last run is shorter.
    """
    if grain is None:
        grain = COARSEST_GRAIN
        while grain > least and (size % grain or size // grain < RUNS_PER_RANK * tp):
            grain //= 2
        runs = even_runs(-(-size // grain), tp)
        if size % grain and size > grain * (tp - 1):
            cut = tuple(((start * grain, min(stop * grain, size)),) for ((start, stop),) in runs)
            return Layout(axis, size, 1, cut)
    if size % grain or size // grain < tp:
        raise ShardingError(
            f"The axis {axis} of {size} cannot be split over {tp} ranks",
            got=f"a grain of {grain}",
            expected=f"a grain that divides {size} into at least {tp} parts",
        )
    return Layout(axis, size // grain, grain, even_runs(size // grain, tp))


ExpertPlans = Mapping[str, tuple[Layout, float]]
"""The plans for experts that exist, by name, the splitting one first.

Each has its layout, and the experts' worth of weights that the busiest rank is expected to read for
a token, if all choices are equally likely."""


def choose_experts(plans: ExpertPlans, how: str) -> Layout:
    """Return the layout of the plan of this name, or with "auto" that with the least cost."""
    layout, _ = min(plans.values(), key=itemgetter(1)) if how == "auto" else plans[how]
    return layout


def expert_plans(count: int, features: int, chosen: int, tp: int, least: int = 1) -> ExpertPlans:
    """Return the plans for `count` experts, of which a token chooses some.

    They can be cut at multiples of `least` features.
    """
    plans: dict[str, tuple[Layout, float]] = {}
    if features // least >= tp:
        split = plan_axis("expert_ffn", features, tp, None, least)
        widest = max(split.extent(rank) for rank in range(tp))
        plans["tp"] = split, chosen * widest / features
    if count >= tp:
        whole = Layout(EXPERT_AXIS, count, 1, even_runs(count, tp))
        held = [whole.extent(rank) for rank in range(tp)]
        plans["ep"] = whole, _expected_most(held, chosen)
    return plans


def _expected_most(held: Sequence[int], chosen: int) -> float:
    """Return the expected maximum over the ranks of how many chosen experts they hold."""
    ways = math.comb(sum(held), chosen)

    def at_most(limit: int) -> int:
        """Return the number of choices of which no rank holds more than `limit`."""
        total = [1] + [0] * chosen  # by the number of experts chosen so far
        for count in held:
            terms = [math.comb(count, taken) for taken in range(limit + 1)]
            total = [
                sum(total[k - taken] * terms[taken] for taken in range(min(k, limit) + 1))
                for k in range(chosen + 1)
            ]
        return total[chosen]

    return sum(1 - at_most(limit) / ways for limit in range(chosen))
