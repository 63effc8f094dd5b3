"""A step of linear attention with one new token per sequence, after its inputs are projected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpcompile.ir.layout import FusedLayout
from tpcompile.ir.ops.composite import composite
from tpcompile.ir.ops.decode.norm_linear import SPLIT
from tpcompile.ir.ops.decode.norm_qkv import UNFLATTEN
from tpcompile.ir.ops.delta import DELTA_DECAY
from tpcompile.ir.ops.groups import local_map
from tpcompile.ir.ops.norm import GATED_RMS_NORM
from tpcompile.ir.ops.resumed import RESUMED_CONV, RESUMED_DELTA_RULE
from tpcompile.ir.ops.spec import Cost, numel, streaming_cost
from tpcompile.ir.types import ValueType

aten = torch.ops.aten
FLATTEN = aten.flatten.using_ints


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
    """Convolve, update the state, and return the gated results of all value heads, `[T, values]`.

    `projected` has the channels of the convolution, then the gates of the results; `gates` has the
    shares of all heads, then what their decays depend on.
    """
    heads, value = rate.shape[0], norm.shape[0]
    channels, values, key = weight.shape[0], heads * value, states.shape[-2]
    keys = (channels - values) // 2
    x, z = _two(projected, channels, values)
    share, a = _two(gates, heads, heads)
    mixed = RESUMED_CONV(x, weight, bias, tails, starts, lengths, read, write, layer)
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


def _cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    """Return the cost of reading and writing the state of a sequence once."""
    projected, gates, weight, states = (operands[place] for place in (0, 1, 2, -6))
    streamed = streaming_cost(result, [projected, gates, weight], rank)
    state = numel(states.local_shape(rank)[2:])
    return Cost(7 * state, streamed.memory_bytes + 8 * state)


DELTA_STEP = composite(
    delta_step,
    overwrites=("tails", "states"),
    cost=_cost,
    localize=_localize,
    takes_roles=True,
)
