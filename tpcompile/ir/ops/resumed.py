"""Linear attention that resumes from the states of sequences, and writes their new states.

`tails[layers, states, taps - 1, channels]` are the last inputs of the convolution, and
`states[layers, states, value heads, key width, value width]` the matrices of the delta rule. A step
reads state `read[i]` of sequence `i`, unless the sequence is new, and writes state `write[i]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from tpcompile.ir.ops.delta import (
    conv_rule,
    convolved,
    delta_cost,
    delta_localize,
    delta_rule,
    delta_rule_type,
    new_state,
)
from tpcompile.ir.ops.spec import define, require, streaming_cost
from tpcompile.ir.roles import StatesOf
from tpcompile.ir.types import REPLICATE, Shard, ValueType
from tpcompile.ir.values.recurrent import resumed_conv_value, resumed_rule_value

TAIL_CHANNELS = 3
"""The dimension of the tails that may be sharded."""
STATE_HEADS = 2
"""The dimension of the states that may be sharded."""


def resumed_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Compute the `causal_conv` of new tokens, after the tokens whose tails are stored."""
    out, tail_length = torch.empty_like(x), weight.shape[-1] - 1
    for tokens, is_new, old, new in _sequences(starts, lengths, read, write):
        tail = x.new_zeros(tail_length, x.shape[-1]) if is_new else tails[layer, old]
        inputs = torch.cat([tail, x[tokens]])
        out[tokens] = convolved(inputs, weight, bias)
        tails[layer, new] = inputs[len(inputs) - tail_length :]
    return out


def resumed_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    layer: int,
    k_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute the `gated_delta_rule` of new tokens, starting from the states."""
    out = torch.empty_like(v)
    for tokens, is_new, old, new in _sequences(starts, lengths, read, write):
        state = states[layer, new]
        state.copy_(new_state(k, v) if is_new else states[layer, old])
        out[tokens] = delta_rule(
            q[tokens], k[tokens], v[tokens], decay[tokens], beta[tokens], state, k_heads
        )
    return out


def _sequences(
    starts: torch.Tensor, lengths: torch.Tensor, read: torch.Tensor, write: torch.Tensor
) -> Iterator[tuple[slice, bool, int, int]]:
    """Yield the tokens of each sequence with new ones, whether it is new, and its two states."""
    numbers = (tensor.tolist() for tensor in (lengths, read, write))
    for (start, stop), length, old, new in zip(pairwise(starts.tolist()), *numbers, strict=True):
        if stop > start:
            yield slice(start, stop), length == stop - start, old, new


def check_states(states: ValueType, layer: int, shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Refuse a value that is not states of this shape and dtype, with this layer."""
    require(
        states.role == StatesOf() and states.shape[2:] == shape and states.dtype == dtype,
        "states",
        states,
        f"states [layers, states, {', '.join(map(str, shape))}] of {dtype}",
    )
    layers = states.extent(0)
    require(0 <= layer < layers, "states", f"layer {layer}", f"one of {layers} layers")


def check_roles(*kinds: ValueType | None) -> None:
    """Refuse operands other than states that have a role."""
    for kind in kinds:
        known = kind is None or kind.role is None
        require(known, "head-order", kind, "features in the model's order")


def check_resumed(lengths: ValueType, read: ValueType, write: ValueType) -> None:
    """Refuse lengths or numbers of states of the wrong dtype, placement or shape."""
    for kind in (lengths, read, write):
        known = kind.placement == REPLICATE and kind.dtype == torch.long and kind.dims == 1
        require(known, "states", kind, "one i64 per sequence, on every rank")
    same = lengths.shape == read.shape == write.shape
    require(same, "states", f"{lengths}, {read}, {write}", "one number per sequence in each")


def _conv_rule(
    x: ValueType,
    weight: ValueType,
    bias: ValueType | None,
    tails: ValueType,
    starts: ValueType,
    lengths: ValueType,
    read: ValueType,
    write: ValueType,
    layer: int,
) -> ValueType:
    check_roles(x, weight, bias, starts, lengths, read, write)
    result = conv_rule(x, weight, bias, starts, layer)
    check_states(tails, layer, (weight.extent(2) - 1, x.shape[-1]), x.dtype)
    layout = x.layout_of(-1)
    wanted = REPLICATE if layout is None else Shard(TAIL_CHANNELS, layout)
    require(tails.placement == wanted, "states", f"{tails} for {x}", "the rank's own channels")
    check_resumed(lengths, read, write)
    return result


def _delta_rule(
    q: ValueType,
    k: ValueType,
    v: ValueType,
    decay: ValueType,
    beta: ValueType,
    states: ValueType,
    starts: ValueType,
    lengths: ValueType,
    read: ValueType,
    write: ValueType,
    layer: int,
    k_heads: tuple[int, ...] | None = None,
) -> ValueType:
    check_roles(q, k, v, decay, beta, starts, lengths, read, write)
    result = delta_rule_type(q, k, v, decay, beta, starts, layer, k_heads)
    check_states(states, layer, (v.shape[-2], k.shape[-1], v.shape[-1]), torch.float32)
    layout = v.layout_of(-2)
    wanted = REPLICATE if layout is None else Shard(STATE_HEADS, layout)
    require(states.placement == wanted, "states", f"{states} for {v}", "the rank's own heads")
    check_resumed(lengths, read, write)
    return result


RESUMED_CONV = define(
    resumed_conv,
    fake=lambda x, *_: torch.empty_like(x),
    overwrites=("tails",),
    rule=_conv_rule,
    cost=streaming_cost,
    takes_roles=True,
    value=resumed_conv_value,
)
RESUMED_DELTA_RULE = define(
    resumed_delta_rule,
    fake=lambda q, k, v, *_, **__: torch.empty_like(v),
    overwrites=("states",),
    rule=_delta_rule,
    cost=delta_cost,
    localize=delta_localize,
    takes_roles=True,
    value=resumed_rule_value,
)
