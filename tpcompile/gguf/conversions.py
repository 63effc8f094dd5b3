"""Conversions of llama.cpp, which are undone when a tensor is read: other orders, other values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Order:
    """The order in which a file stores the elements along an axis.

    It stores them as `[groups, outer, inner, …]`; transformers has `[groups, inner, outer, …]`.
    """

    axis: int
    groups: int
    outer: int
    inner: int
    first: int = 0
    """The elements before them, which are in the same order in both."""

    def places(self, extent: int) -> torch.Tensor:
        """Return the stored place of each element along an axis of this extent."""
        stored = torch.arange(self.first, extent).view(self.groups, self.outer, self.inner, -1)
        return torch.cat((torch.arange(self.first), stored.transpose(1, 2).flatten()))


@dataclass(frozen=True)
class Heads:
    """The order of rows of heads that have several parts.

    A file stores all heads of a part, then those of the next; transformers has the parts of a head
    one after another.
    """

    count: int
    widths: tuple[int, ...]
    """The rows of each part of a head."""
    axis: int = 0

    def places(self, extent: int) -> torch.Tensor:
        """Return the stored place of each row."""
        parts = torch.split(torch.arange(extent), [self.count * width for width in self.widths])
        return torch.cat([part.view(self.count, -1) for part in parts], 1).flatten()


@dataclass(frozen=True)
class Transform:
    """A function from stored values to the values of a tensor, both in fp32."""

    function: Callable[[torch.Tensor], torch.Tensor]
    expected: str
    """The stored values for which the result is finite."""


def _one_less(stored: torch.Tensor) -> torch.Tensor:
    return stored - 1


def _logarithm(stored: torch.Tensor) -> torch.Tensor:
    return stored.double().neg().log().to(stored.dtype)


CENTRED = Transform(_one_less, "finite numbers")
"""Scales of norms that are stored with 1 added."""
LOGARITHM = Transform(_logarithm, "negative numbers")
"""Logarithms of which the negative exponentials are stored."""
