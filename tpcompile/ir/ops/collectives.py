"""Collectives between ranks.

`redistribute` requests the whole value on every rank; the pass `insert-collectives` replaces it
with the collective that produces it. On one rank each of these ops is a copy. `dtype` is the dtype
in which a sum is computed and returned: terms of bf16 are added in fp32, so that a sum is rounded
once, as on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.layout import Layout, TokenLayout
from tpcompile.ir.ops.spec import Cost, CostRule, define, local_bytes, refuse, require
from tpcompile.ir.types import REPLICATE, Partial, Shard, ValueType
from tpcompile.ir.values.build import unchanged
from tpcompile.ir.values.node import is_exact

_T = TypeVar("_T")


def tree_sum(values: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Sum values in a fixed tree, so that the result does not depend on the order of arrival."""
    terms = [value if dtype is None else value.to(dtype) for value in values]
    return fold_tree(terms, lambda a, b: a + b)


def fold_tree(values: Sequence[_T], join: Callable[[_T, _T], _T]) -> _T:
    """Combine values in a fixed tree: neighbours first, then neighbours of neighbours."""
    level = list(values)
    while len(level) > 1:
        pairs = [join(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def gather(values: Sequence[torch.Tensor], kind: ValueType) -> torch.Tensor:
    """Return the whole value, given the ranks' parts and their type."""
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
    """Return the whole value, whatever its placement."""
    if isinstance(kind.placement, Partial):
        return tree_sum(values)
    return values[0] if kind.placement == REPLICATE else gather(values, kind)


def _redistribute_rule(x: ValueType, dtype: torch.dtype | None = None) -> ValueType:
    if isinstance(x.placement, Partial):
        return _sum_of(x, dtype)
    return ValueType(x.shape, dtype or x.dtype)


def _all_reduce_rule(x: ValueType, dtype: torch.dtype | None = None) -> ValueType:
    _require_terms("all-reduce", x)
    return _sum_of(x, dtype)


def _all_gather_rule(x: ValueType, dim: int) -> ValueType:
    layout = x.layout_of(dim)
    if layout is None:
        refuse("all-gather", x, f"a value sharded along dimension {dim}")
    overlap = layout.overlap()
    require(overlap is None, "all-gather", overlap, "disjoint parts")
    if not isinstance(layout, TokenLayout):
        ends = [end for rank in range(layout.ranks) for end in layout.intervals(rank)]
        in_order = isinstance(layout, Layout) and ends == sorted(ends)
        require(
            in_order, "all-gather", f"{x}, parts {ends}", "one axis with its parts in rank order"
        )
    return x.placed(REPLICATE)


def _reduce_scatter_rule(x: ValueType, ranks: int, dtype: torch.dtype | None = None) -> ValueType:
    _require_terms("reduce-scatter", x)
    require(isinstance(x.shape[0], str), "reduce-scatter", x, "tokens along dimension 0")
    return _sum_of(x, dtype).sharded(0, TokenLayout(ranks, str(x.shape[0])))


def _require_terms(rule: str, x: ValueType) -> None:
    terms = isinstance(x.placement, Partial)
    require(terms, rule, x, "Partial(sum)", "a value that is already summed would count tp times")


def _sum_of(terms: ValueType, dtype: torch.dtype | None) -> ValueType:
    """Return the type of a sum, which is rounded once: not after each of its terms."""
    assert isinstance(terms.placement, Partial)
    total = ValueType(terms.shape, dtype or terms.dtype)
    wide = torch.promote_types(terms.dtype, torch.float32)
    require(
        terms.placement.disjoint or is_exact(wide, total.dtype),
        "sum-dtype",
        f"terms {terms}, added in {dtype_name(total.dtype)}",
        f"a sum in {dtype_name(wide)}",
        f"pass dtype={wide} to the collective, and cast its result: each addition rounds",
        replace(total, dtype=wide),
    )
    return total


def _redistribute_across(
    values: Sequence[torch.Tensor], kind: ValueType, result: ValueType
) -> list[torch.Tensor]:
    if isinstance(kind.placement, Partial):
        return _sum_across(values, kind, result)
    return _gather_across(values, kind, result)


def _gather_across(
    values: Sequence[torch.Tensor], kind: ValueType, result: ValueType
) -> list[torch.Tensor]:
    whole = to_whole(values, kind).to(result.dtype)
    return [whole.clone() for _ in values]


def _sum_across(
    values: Sequence[torch.Tensor], kind: ValueType, result: ValueType
) -> list[torch.Tensor]:
    """Sum regardless of the operand's placement, so that a misplaced sum changes the result."""
    total = tree_sum(values, result.dtype)
    return [total.clone() for _ in values]


def _scatter_across(
    values: Sequence[torch.Tensor], kind: ValueType, result: ValueType
) -> list[torch.Tensor]:
    assert isinstance(result.placement, Shard)
    layout = result.placement.layout
    assert isinstance(layout, TokenLayout)
    whole = tree_sum(values, result.dtype)
    runs = (layout.run(rank, len(whole)) for rank in range(len(values)))
    return [whole[start:stop].clone() for start, stop in runs]


def _cast_clone(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return x.to(dtype or x.dtype, copy=True)


def all_gather(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.clone()


def reduce_scatter(x: torch.Tensor, ranks: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _cast_clone(x, dtype)


def _wire_cost(trips: int) -> CostRule:
    """Return the cost rule of a collective that sends the value `trips` times.

    In a ring of n ranks, (n - 1)/n of these bytes are sent.
    """

    def cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
        whole = local_bytes(operands[0].placed(REPLICATE), rank)
        return Cost(memory_bytes=2 * whole, wire_bytes=trips * whole)

    return cost


REDISTRIBUTE = define(
    _cast_clone,
    name="redistribute",
    rule=_redistribute_rule,
    cost=_wire_cost(2),
    across=_redistribute_across,
    value=unchanged,
)
ALL_REDUCE = define(
    _cast_clone,
    name="all_reduce",
    rule=_all_reduce_rule,
    cost=_wire_cost(2),
    across=_sum_across,
    value=unchanged,
)
ALL_GATHER = define(
    all_gather,
    rule=_all_gather_rule,
    cost=_wire_cost(1),
    across=_gather_across,
    value=unchanged,
)
REDUCE_SCATTER = define(
    reduce_scatter,
    rule=_reduce_scatter_rule,
    cost=_wire_cost(1),
    across=_scatter_across,
    value=unchanged,
)
COLLECTIVES = (REDISTRIBUTE, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
