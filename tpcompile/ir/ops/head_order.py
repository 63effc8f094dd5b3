"""The order of elements within heads: the model's own, or with the two halves interleaved."""

from __future__ import annotations

from tpcompile.ir.ops.spec import require
from tpcompile.ir.roles import Interleaved, Role, one_head
from tpcompile.ir.types import ValueType


def role_of_heads(rows: ValueType, dim: int, width: int) -> Role | None:
    """Return the role of heads of this width that are cut from the rows of a projection."""
    if rows.role is None:
        return None
    extent = rows.shape[dim]
    require(
        dim == rows.dims - 1 and rows.role == Interleaved(((int(extent), width),)),
        "head-order",
        f"{rows} in heads of {width}",
        "the width of the interleaved heads",
    )
    return one_head(width)


def roles_of_parts(
    rows: ValueType, sizes: tuple[int, ...], dim: int
) -> tuple[Interleaved | None, ...]:
    """Return the role of each part of split rows."""
    if rows.role is None:
        return (None,) * len(sizes)
    runs = rows.role.runs if isinstance(rows.role, Interleaved) else ()
    require(
        dim == rows.dims - 1 and tuple(size for size, _ in runs) == tuple(sizes),
        "head-order",
        f"sizes {sizes} of {rows}",
        "parts that match the runs of rows in the role",
    )
    return tuple(Interleaved((run,)) if run[1] else None for run in runs)


def is_interleaved(heads: ValueType) -> bool:
    """Return whether `heads[…, width]` are interleaved, and refuse any other role."""
    known = heads.role in (None, one_head(heads.extent(-1)))
    require(known, "head-order", heads, "heads in the model's order, or interleaved")
    return heads.role is not None
