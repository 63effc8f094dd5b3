"""Roles: the part of a type that distinguishes values of the same shape, dtype and placement.

An op refuses an operand with a role, unless its rule handles roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    A state is never changed. So sequences may share it, and it is a snapshot as long as it is held.
    """

    def __str__(self) -> str:
        return "states"


Role = CacheOf | StatesOf | QueriesOf | SpansOf | Interleaved


def one_head(width: int) -> Interleaved:
    """Return the role of single heads of this width."""
    return Interleaved(((width, width),))


def joined_roles(parts: Sequence[tuple[int, Role | None]]) -> Interleaved | None:
    """Return the role of concatenated parameters, each given as (number of rows, role)."""
    if all(role is None for _, role in parts):
        return None
    runs: list[tuple[int, int]] = []
    for rows, role in parts:
        runs += role.runs if isinstance(role, Interleaved) else [(rows, 0)]
    return Interleaved(tuple(runs))
