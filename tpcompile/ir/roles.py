"""Roles: the part of a type that distinguishes values of the same shape, dtype and placement.

An op refuses an operand with a role, unless its rule handles roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class CacheOf:
    """A KV cache in blocks of `block` tokens."""

    block: int

    def __str__(self) -> str:
        return f"cache(block={self.block})"


@dataclass(frozen=True)
class QueriesOf:
    """Queries of a step whose keys and values are stored in this layer of the cache."""

    layer: int
    block: int

    def __str__(self) -> str:
        return f"queries(layer={self.layer}, block={self.block})"


@dataclass(frozen=True)
class SpansOf:
    """The values or the log-sum-exp of partial attention over the spans of one cache layer."""

    part: str
    layer: int
    block: int
    spans: int

    def __str__(self) -> str:
        return f"{self.part}(layer={self.layer}, block={self.block}, spans={self.spans})"


@dataclass(frozen=True)
class Interleaved:
    """Rows of heads whose two halves are interleaved, as runs of (number of rows, head width).

    A run with a width of 0 is in the model's own order. The rows are the first dimension of a
    parameter and the last dimension of an activation.
    """

    runs: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"interleaved({', '.join(f'{rows} by {width}' for rows, width in self.runs)})"


@dataclass(frozen=True)
class StatesOf:
    """States of linear attention, one per layer and sequence. A step reads one and writes another.

    A state is never changed. So sequences may share it, and a state that is held is a snapshot.
    """

    def __str__(self) -> str:
        return "states"


class Run(NamedTuple):
    """Rows of a tensor: `rows` of them, `width` after each multiple of `stride`, from `first` on.

    With `stride` 0 they are consecutive rows.
    """

    rows: int
    width: int = 0
    first: int = 0
    stride: int = 0


@dataclass(frozen=True)
class HeadParts:
    """Rows of a parameter that are parts of the heads of its tensors, as runs of a tensor each.

    Only parameters have this role: the rows that they compute are whole heads of their own.
    """

    runs: tuple[Run, ...]

    def __str__(self) -> str:
        return f"parts({', '.join(map(_spoken, self.runs))})"


def _spoken(run: Run) -> str:
    if not run.stride:
        return str(run.rows)
    return f"{run.rows} by {run.width} from {run.first} of {run.stride}"


Role = CacheOf | StatesOf | QueriesOf | SpansOf | Interleaved | HeadParts


def one_head(width: int) -> Interleaved:
    """Return the role of single heads of this width."""
    return Interleaved(((width, width),))


def joined_roles(parts: Sequence[tuple[int, Role | None]]) -> Interleaved | HeadParts | None:
    """Return the role of concatenated parameters, each given as (number of rows, role)."""
    if all(role is None for _, role in parts):
        return None
    if any(isinstance(role, HeadParts) for _, role in parts):
        part_runs = (
            role.runs if isinstance(role, HeadParts) else (Run(rows),) for rows, role in parts
        )
        return HeadParts(tuple(run for runs in part_runs for run in runs))
    runs: list[tuple[int, int]] = []
    for rows, role in parts:
        runs += role.runs if isinstance(role, Interleaved) else [(rows, 0)]
    return Interleaved(tuple(runs))
