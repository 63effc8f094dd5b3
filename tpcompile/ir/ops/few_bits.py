"""Weights of few bits as linears multiply them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tpcompile.ir.format import Format
from tpcompile.ir.layout import Interval
from tpcompile.ir.ops.linear import LINEAR
from tpcompile.ir.ops.spec import SPECS
from tpcompile.ir.quantize import rounded


@dataclass(frozen=True)
class RoundingWeight:
    """A weight of a linear that rounds its input to int8.

    Ops take it in the place of a tensor. Values in fp32 are multiplied, and the result is rounded
    once, to the dtype of the input.
    """

    values: torch.Tensor
    """The exact values, in fp32."""
    format: Format
    first: int
    """The first column, among those of the whole weight."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the linear."""
        wide = None if bias is None else bias.float()
        found = functional.linear(rounded(x, self.format, self.first), self.values, wide)
        return found.to(x.dtype)

    @classmethod
    def __torch_function__(
        cls, target: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a linear, or the body of an op that contains one."""
        bound = SPECS[target].bind(args, kwargs or {})
        if target is LINEAR:
            return bound["weight"].linear(bound["input"], bound["bias"])
        return SPECS[target].reference(**bound)


def decoded(
    word: str, parts: Sequence[torch.Tensor], columns: Interval, dtype: torch.dtype
) -> torch.Tensor | RoundingWeight:
    """Return a weight for linears from its components, given the name of its format.

    The rows consist of these columns of the whole weight.
    """
    stored = Format.parsed(word)
    named = {one.suffix: part for one, part in zip(stored.components, parts, strict=True)}
    if stored.rounds:
        values = stored.decoded(named, columns, torch.float32)
        return RoundingWeight(values, stored, columns[0])
    return stored.decoded(named, columns, dtype)
