"""What crosses between ranks.

`redistribute` says what is wanted; the pass `insert-collectives` turns it into the collective
that does it. On one rank each of them is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.ops.spec import Cost, CostRule, define, local_bytes, refuse, require
from tpcompile.ir.types import REPLICATE, Partial, Shard, ValueType


def tree_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours first, then neighbours of neighbours: one order, whoever comes first."""
    level = list(values)
    while len(level) > 1:
        pairs = [a + b for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def gather(values: Sequence[torch.Tensor], kind: ValueType) -> torch.Tensor:
    """The whole value from the parts that `kind` says the ranks hold."""
    assert isinstance(kind.placement, Shard)
    dim, layout = kind.placement.dim, kind.placement.layout
    if isinstance(layout, TokenLayout):
        return torch.cat(list(values), dim)
    shape = list(values[0].shape)
    shape[dim] = layout.size
    whole = values[0].new_empty(shape)
    for rank, value in enumerate(values):
        offset = 0
        for start, stop in layout.intervals(rank):
            part = value.narrow(dim, offset, stop - start)
            whole.narrow(dim, start, stop - start).copy_(part)
            offset += stop - start
    return whole


def to_whole(values: Sequence[torch.Tensor], kind: ValueType) -> torch.Tensor:
    """The value itself, whatever its placement."""
    if isinstance(kind.placement, Partial):
        return tree_sum(values)
    return values[0] if kind.placement == REPLICATE else gather(values, kind)


def _redistribute_rule(x: ValueType) -> ValueType:
    return x.placed(REPLICATE)


def _all_reduce_rule(x: ValueType) -> ValueType:
    if not isinstance(x.placement, Partial):
        refuse("all-reduce", x, "Partial(sum)", "a value already summed would count tp times")
    return x.placed(REPLICATE)


def _all_gather_rule(x: ValueType, dim: int) -> ValueType:
    layout = x.layout_of(dim)
    if layout is None:
        refuse("all-gather", x, f"a value sharded along dimension {dim}")
    overlap = layout.overlap()
    require(overlap is None, "all-gather", overlap, "disjoint parts")
    return x.placed(REPLICATE)


def _reduce_scatter_rule(x: ValueType, ranks: int) -> ValueType:
    if not isinstance(x.placement, Partial):
        refuse("reduce-scatter", x, "Partial(sum)", "a value already summed would count tp times")
    require(isinstance(x.shape[0], str), "reduce-scatter", x, "tokens along dimension 0")
    return x.sharded(0, TokenLayout(ranks, str(x.shape[0])))


def _across_whole(
    values: Sequence[torch.Tensor], kind: ValueType, result: ValueType
) -> list[torch.Tensor]:
    whole = to_whole(values, kind)
    return [whole.clone() for _ in values]


def _across_scatter(
    values: Sequence[torch.Tensor], kind: ValueType, result: ValueType
) -> list[torch.Tensor]:
    assert isinstance(result.placement, Shard)
    layout = result.placement.layout
    assert isinstance(layout, TokenLayout)
    whole = tree_sum(values)
    runs = (layout.run(rank, len(whole)) for rank in range(len(values)))
    return [whole[start:stop].clone() for start, stop in runs]


def _wire_cost(trips: int) -> CostRule:
    def cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
        """In a large ring a gather or a scatter sends the value once, a sum sends it twice."""
        whole = local_bytes(operands[0].placed(REPLICATE), rank)
        return Cost(memory_bytes=2 * whole, wire_bytes=trips * whole)

    return cost


REDISTRIBUTE = define(
    "redistribute(Tensor x) -> Tensor",
    reference=torch.clone,
    fake=torch.empty_like,
    rule=_redistribute_rule,
    cost=_wire_cost(2),
    across=_across_whole,
)
ALL_REDUCE = define(
    "all_reduce(Tensor x) -> Tensor",
    reference=torch.clone,
    fake=torch.empty_like,
    rule=_all_reduce_rule,
    cost=_wire_cost(2),
    across=_across_whole,
)
ALL_GATHER = define(
    "all_gather(Tensor x, int dim) -> Tensor",
    reference=lambda x, dim: x.clone(),
    fake=lambda x, dim: torch.empty_like(x),
    rule=_all_gather_rule,
    cost=_wire_cost(1),
    across=_across_whole,
)
REDUCE_SCATTER = define(
    "reduce_scatter(Tensor x, int ranks) -> Tensor",
    reference=lambda x, ranks: x.clone(),
    fake=lambda x, ranks: torch.empty_like(x),
    rule=_reduce_scatter_rule,
    cost=_wire_cost(1),
    across=_across_scatter,
)
COLLECTIVES = (REDISTRIBUTE, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
