"""The activations of MLPs in programs, one row each.

The ops, fusions and instructions of an activation follow from its row. Each backend of programs has
a function with the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

import torch

from tpcompile.ir.ops.composite import pattern_of
from tpcompile.ir.pattern import Call

aten = torch.ops.aten


class Activation(IntEnum):
    """An activation: its number in instructions, and its function over ops."""

    SILU = 1, aten.silu.default
    GELU = 2, aten.gelu.default
    GELU_TANH = 3, partial(aten.gelu.default, approximate="tanh")
    RELU = 4, aten.relu.default
    RELU2 = 5, lambda x: aten.square.default(aten.relu.default(x))

    function: Callable[[Any], Any]

    def __new__(cls, number: int, function: Callable[[Any], Any]) -> Activation:
        member = int.__new__(cls, number)
        member._value_ = number
        member.function = function
        return member

    def of(self, *projections: Any) -> Any:
        """Compute act(gate) · up, or act(up) of an MLP without a gate."""
        first, *up = projections
        active = self.function(first)
        return active * up[0] if up else active

    def pattern(self, gated: bool) -> Call:
        """Return the calls between the projections and the down projection."""
        call: Call = pattern_of(self.of, *(("gate", "up") if gated else ("up",)))
        return call
