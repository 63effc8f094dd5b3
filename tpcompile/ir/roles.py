"""Roles: the part of a type that tells apart values of one shape, dtype and placement.

An op refuses an operand with a role, unless its rule says what it does with it.
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
    """Queries of a step whose keys and values are in this layer of the cache."""

    layer: int
    block: int

    def __str__(self) -> str:
        return f"queries(layer={self.layer}, block={self.block})"


@dataclass(frozen=True)
class SpansOf:
    """The values, or the log-sum-exp, of attention to one layer of the cache in spans."""

    part: str
    layer: int
    block: int
    spans: int

    def __str__(self) -> str:
        return f"{self.part}(layer={self.layer}, block={self.block}, spans={self.spans})"


@dataclass(frozen=True)
class Interleaved:
    """Rows of heads, in runs: the number of rows of each, and the width of its heads.

    The two halves of each head are interleaved; a width of 0 is a run in the model's own order.
    The rows are the first dimension of a parameter and the last of an activation.
    """

    runs: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"interleaved({', '.join(f'{rows} by {width}' for rows, width in self.runs)})"


Role = CacheOf | QueriesOf | SpansOf | Interleaved


def one_head(width: int) -> Interleaved:
    """The role of single heads of this width."""
    return Interleaved(((width, width),))


def joined_roles(parts: Sequence[tuple[int, Role | None]]) -> Interleaved | None:
    """The role of parameters one after the other, each with its number of rows."""
    if all(role is None for _, role in parts):
        return None
    runs: list[tuple[int, int]] = []
    for rows, role in parts:
        runs += role.runs if isinstance(role, Interleaved) else [(rows, 0)]
    return Interleaved(tuple(runs))
