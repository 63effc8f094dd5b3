"""Token embedding, with a whole table or one split by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tpcompile.ir.layout import Layout
from tpcompile.ir.ops.spec import declare, define, refuse, require, streaming_cost
from tpcompile.ir.types import DISJOINT, REPLICATE, ValueType
from tpcompile.ir.values.scope import Scope
from tpcompile.ir.values.value import OpaqueError, Value
from tpcompile.ir.values.views import rows_of

aten = torch.ops.aten


def vocab_embedding(weight: torch.Tensor, ids: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Look up ids in the part of the table that starts at `first_row`; other ids give zeros."""
    rows, inside = local_rows(ids, first_row, weight.shape[0])
    return functional.embedding(rows, weight).where(inside.unsqueeze(-1), 0)


def local_rows(ids: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of ids in a part of a table, and which ids are in it; others have row 0."""
    local = ids - first
    inside = (local >= 0) & (local < count)
    return local.where(inside, 0), inside


def embedding_rule(weight: ValueType, indices: ValueType, **_: Any) -> ValueType:
    if weight.layout_of(0) is not None:
        refuse(
            "vocab-offset",
            weight,
            "the whole table",
            "ids refer to the whole vocabulary: use tpc.vocab_embedding for a part of it",
        )
    require(
        weight.placement == REPLICATE and indices.placement == REPLICATE,
        "embedding",
        f"{weight} at {indices}",
        "a replicated table and replicated ids",
    )
    return ValueType((*indices.shape, weight.shape[1]), weight.dtype)


def vocab_embedding_rule(weight: ValueType, ids: ValueType, first_row: int = 0) -> ValueType:
    require(ids.placement == REPLICATE, "embedding", ids, "the same ids on every rank")
    require(
        first_row == 0,
        "vocab-offset",
        first_row,
        "no offset, since each rank's offset is derived from the layout",
    )
    shape = (*ids.shape, weight.shape[1])
    layout = weight.layout_of(0)
    if layout is None:
        require(
            weight.placement == REPLICATE,
            "embedding",
            weight,
            "a table that is whole or split by rows",
        )
        return ValueType(shape, weight.dtype)
    contiguous = isinstance(layout, Layout) and all(len(part) == 1 for part in layout.parts)
    require(contiguous, "vocab-offset", weight, "one run of rows per rank")
    overlap = layout.overlap()
    require(
        overlap is None, "vocab-rows", overlap, "disjoint rows, since shared rows would count twice"
    )
    return ValueType(shape, weight.dtype, DISJOINT)


def vocab_embedding_localize(
    result: ValueType, rank: int, weight: ValueType, **_: Any
) -> dict[str, Any]:
    layout = weight.layout_of(0)
    return {} if layout is None else {"first_row": _first(layout, rank)}


def _first(layout: object, rank: int) -> int:
    assert isinstance(layout, Layout)
    return layout.intervals(rank)[0][0]


def _rows(scope: Scope, weight: Value, indices: Value, **options: Any) -> Value:
    """Return the expression of an embedding; its other options concern gradients."""
    return rows_of(scope, weight, indices)


def _vocab_rows(scope: Scope, weight: Value, ids: Value, first_row: int = 0) -> Value:
    if first_row:
        raise OpaqueError("the offset of a rank follows from the layout")
    return rows_of(scope, weight, ids)


EMBEDDING = declare(
    aten.embedding.default, embedding_rule, streaming_cost, in_formats=("weight",), value=_rows
)
VOCAB_EMBEDDING = define(
    vocab_embedding,
    rule=vocab_embedding_rule,
    cost=streaming_cost,
    localize=vocab_embedding_localize,
    in_formats=("weight",),
    value=_vocab_rows,
)
EMBEDDINGS = (EMBEDDING, VOCAB_EMBEDDING)
"""The ops that look up rows of a table."""
