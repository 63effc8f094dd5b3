"""Heads in groups: each head of one axis reads one head of another, shared by its group.

Query heads read KV heads, and value heads of linear attention read its key heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpcompile.ir.layout import AnyLayout, Layout
from tpcompile.ir.ops.spec import refuse, require
from tpcompile.ir.types import REPLICATE, Partial, ValueType


def check_whole_heads(kind: ValueType, dim: int) -> None:
    """Refuse a value that is neither replicated nor sharded in single heads along `dim`."""
    if isinstance(kind.placement, Partial):
        refuse("partial-nonlinear", kind, "an operand that is already summed")
    layout = kind.layout_of(dim)
    sharded_elsewhere = kind.placement != REPLICATE and layout is None
    require(not sharded_elsewhere, "whole-heads", kind, "a value sharded by head or not at all")
    whole = layout is None or (isinstance(layout, Layout) and layout.grain == 1)
    require(whole, "whole-heads", kind, "a layout in units of single heads")


def check_groups(
    readers: AnyLayout | None, read: AnyLayout | None, group: int, rule: str, names: tuple[str, str]
) -> None:
    """Refuse layouts in which a rank lacks a head that its readers read.

    `names` are those of the heads that read and of the heads that they read.
    """
    reader, held = names
    if readers is None:
        got = f"{held} heads on {getattr(read, 'ranks', 1)} ranks"
        require(read is None, rule, got, f"all {held} heads on every rank, like the {reader} heads")
        return
    if read is None:
        return
    assert isinstance(readers, Layout) and isinstance(read, Layout)
    for rank in range(readers.ranks):
        missing = {head // group for head in readers.units_of(rank)}.difference(read.units_of(rank))
        if missing:
            first = min(missing)
            refuse(
                rule,
                f"rank {rank} holds {held} heads {read.units_of(rank)} for {reader} heads "
                f"{readers.units_of(rank)}",
                f"also {held} head {first}, which {reader} head {first * group} reads",
                f"give each rank the {held} heads that its {reader} heads read",
            )


def local_map(
    name: str, readers: AnyLayout | None, read: AnyLayout | None, heads: int, rank: int
) -> dict[str, Any]:
    """Return the head that each of a rank's readers reads, by the argument's name.

    `heads` is the number of heads that are read, of all ranks. Even groups need no argument.
    """
    if readers is None:
        return {}
    assert isinstance(readers, Layout)
    group = readers.units // heads
    held = read.units_of(rank) if isinstance(read, Layout) else list(range(heads))
    places = [held.index(head // group) for head in readers.units_of(rank)]
    shared, remainder = divmod(len(places), len(held))
    even = not remainder and places == [place // shared for place in range(len(places))]
    return {} if even else {name: places}


def heads_read(readers: int, read: int, mapped: Sequence[int] | None) -> Sequence[int]:
    """Return the head that each reader reads: as mapped, or else shared evenly, in order."""
    return mapped or [head * read // readers for head in range(readers)]


def runs_of(read: Sequence[int]) -> list[tuple[int, int, int]]:
    """Group adjacent readers that read the same head, as (head, first reader, last reader)."""
    runs: list[tuple[int, int, int]] = []
    for place, head in enumerate(read):
        if runs and runs[-1][0] == head:
            runs[-1] = (head, runs[-1][1], place)
        else:
            runs.append((head, place, place))
    return runs
