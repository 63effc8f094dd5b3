"""The token with the greatest logit in each row, found without gathering the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tpcompile.ir.layout import Layout
from tpcompile.ir.ops.spec import Cost, define, local_bytes, numel, refuse, require
from tpcompile.ir.types import Partial, ValueType
from tpcompile.ir.values.build import reduced
from tpcompile.ir.values.scope import Scope
from tpcompile.ir.values.value import Value

PAIR_BYTES = 16
"""The bytes that a rank sends per row: a value and an id, each in 64 bits."""


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the id of the greatest logit of each row; among equal logits the lowest id wins."""
    return logits.argmax(-1)


def local_argmax(
    logits: torch.Tensor,
    first: int = 0,
    argmax: Callable[[torch.Tensor], torch.Tensor] = argmax,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest logit of each row and its id, where the first column has the id `first`.

    Among equal logits the lowest id wins. A rank without columns loses to every other rank.
    """
    if not logits.shape[-1]:
        rows = logits.shape[:-1]
        no_id = torch.iinfo(torch.long).max
        return logits.new_full(rows, -torch.inf), logits.new_full(rows, no_id, dtype=torch.long)
    ids = argmax(logits)
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1), ids + first


def best_of(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the best id of each row, given values `[ranks, rows]` and their ids.

    Among equal values the lowest id wins, and NaN wins over any number. Both rules match
    `torch.argmax` on the whole row, if each rank passes the lowest id of its own best value.
    """
    best = values.max(0).values
    winners = (values == best) | (values.isnan() & best.isnan())
    return ids.where(winners, torch.iinfo(ids.dtype).max).amin(0)


def _rule(logits: ValueType) -> ValueType:
    require(logits.dims == 2, "argmax", logits, "logits[R, vocabulary]")
    if isinstance(logits.placement, Partial):
        refuse("partial-nonlinear", logits, "an operand that is already summed")
    layout = logits.layout_of(-1)
    require(
        layout is None or (isinstance(layout, Layout) and _one_run_each(layout)),
        "argmax",
        logits,
        "one run of the vocabulary on each rank",
    )
    require(logits.layout_of(0) is None, "argmax", logits, "every row on every rank")
    return ValueType(logits.shape[:1], torch.long)


def _one_run_each(layout: Layout) -> bool:
    return layout.overlap() is None and all(
        len(layout.intervals(rank)) <= 1 for rank in range(layout.ranks)
    )


def first_column(logits: ValueType, rank: int) -> int:
    """Return the id of the first logit that a rank holds."""
    layout = logits.layout_of(-1)
    if layout is None:
        return 0
    assert isinstance(layout, Layout)
    intervals = layout.intervals(rank)
    return intervals[0][0] if intervals else 0


def _across(
    values: Sequence[torch.Tensor], kind: ValueType, result: ValueType
) -> list[torch.Tensor]:
    if kind.layout_of(-1) is None:
        return [argmax(value) for value in values]
    pairs = [local_argmax(value, first_column(kind, rank)) for rank, value in enumerate(values)]
    best = best_of(*(torch.stack(per_rank) for per_rank in zip(*pairs, strict=True)))
    return [best.clone() for _ in values]


def _cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    """Return the cost; ranks exchange only (value, id) pairs."""
    (logits,) = operands
    layout = logits.layout_of(-1)
    return Cost(
        flops=numel(logits.local_shape(rank)),
        memory_bytes=local_bytes(logits, rank),
        wire_bytes=0 if layout is None else layout.ranks * PAIR_BYTES,
    )


def _value(scope: Scope, logits: Value) -> Value:
    index = reduced(scope.terms, "argmax", logits, torch.long)
    return Value(logits.shape[:-1], torch.long, index.body)


ARGMAX = define(argmax, rule=_rule, cost=_cost, across=_across, value=_value)
