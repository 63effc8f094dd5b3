"""A step of linear attention with one new token per sequence, after its inputs are projected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpcompile.ir.layout import FusedLayout
from tpcompile.ir.ops.composite import composite
from tpcompile.ir.ops.decode.norm_linear import SPLIT
from tpcompile.ir.ops.delta import DELTA_DECAY
from tpcompile.ir.ops.groups import local_map
from tpcompile.ir.ops.norm import GATED_RMS_NORM
from tpcompile.ir.ops.resumed import RESUMED_CONV, RESUMED_DELTA_RULE
from tpcompile.ir.ops.shape import FLATTEN, UNFLATTEN
from tpcompile.ir.ops.spec import Cost, numel, streaming_cost
from tpcompile.ir.types import ValueType

aten = torch.ops.aten


def delta_step_apart(
    projected: torch.Tensor,
    z: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rate: torch.Tensor,
    offset: torch.Tensor,
    states: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    layer: int,
    k_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Convolve, update the state, and return the gated results of all value heads, `[T, values]`.

    `projected` has the channels of the convolution, and `z` the gates of the results; `gates` has
    the shares of all heads, then the inputs of their decays.
    """
    heads, value = rate.shape[0], norm.shape[0]
    channels, values, key = weight.shape[0], heads * value, states.shape[-2]
    keys = (channels - values) // 2
    share, a = _two(gates, heads, heads)
    mixed = RESUMED_CONV(projected, weight, bias, tails, starts, lengths, read, write, layer)
    parts = SPLIT(mixed, [keys, keys, values], -1)
    q, k, v = (
        UNFLATTEN(parts[place], 1, [-1, width]) for place, width in enumerate((key, key, value))
    )
    decay = DELTA_DECAY(a, rate, offset)
    beta = aten.sigmoid.default(share)
    out = RESUMED_DELTA_RULE(
        q, k, v, decay, beta, states, starts, lengths, read, write, layer, k_heads
    )
    gated = GATED_RMS_NORM(out, UNFLATTEN(z, 1, [-1, value]), norm, eps)
    flat: torch.Tensor = FLATTEN(gated, 1, 2)
    return flat


def delta_step(
    projected: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rate: torch.Tensor,
    offset: torch.Tensor,
    states: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    layer: int,
    k_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute `delta_step_apart` of one linear's rows.

    `projected` has the channels of the convolution, then the gates of the results.
    """
    x, z = _two(projected, weight.shape[0], rate.shape[0] * norm.shape[0])
    step = tails, rate, offset, states, norm, eps, starts, lengths, read, write, layer, k_heads
    return delta_step_apart(x, z, gates, weight, bias, *step)


def _two(rows: torch.Tensor, first: int, second: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = SPLIT(rows, [first, second], 1)
    return parts[0], parts[1]


def _localize(
    result: ValueType, rank: int, weight: ValueType, rate: ValueType, **_: Any
) -> dict[str, Any]:
    """Return the key head of each value head of the rank, unless groups are even."""
    channels = weight.layout_of(0)
    if not isinstance(channels, FusedLayout):
        return {}
    keys = channels.segments[0]
    return local_map("k_heads", rate.layout_of(0), keys, keys.units, rank)


def _declare(body: Callable[..., torch.Tensor], streamed: int) -> Any:
    """Declare an op that reads its first operands once, and that changes states."""

    def cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
        """Return the cost of reading and writing the state of a sequence once."""
        moved = streaming_cost(result, operands[:streamed], rank).memory_bytes
        state = numel(operands[-6].local_shape(rank)[2:])
        return Cost(7 * state, moved + 8 * state)

    overwrites = "tails", "states"
    return composite(body, overwrites=overwrites, cost=cost, localize=_localize, takes_roles=True)


DELTA_STEP = _declare(delta_step, 3)
DELTA_STEP_APART = _declare(delta_step_apart, 4)
"""The op if the channels and the gates `z` have a weight each, which may differ in format."""
DELTA_STEPS = (DELTA_STEP, DELTA_STEP_APART)
