"""Linear attention of many tokens in bf16, by kernels of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tpcompile.backends.native.build import library
from tpcompile.backends.native.many import (
    ADDRESS,
    NUMBER,
    Heads,
    Operation,
    fields_of,
    run,
    structure,
    takes,
)
from tpcompile.ir.ops.groups import heads_read

_CHANNELS = 256
"""The channels of an item of a convolution: `kChannels` of prompts_delta.h."""
_COLUMNS = 32
"""The columns of a state in an item of the delta rule: `kStateColumns` of prompts_delta.h."""
_LANES = 16
"""The delta rule takes values whose width is a multiple of this."""


class Sequences(NamedTuple):
    """The tokens of each sequence, its length with them, and the states that it has."""

    starts: torch.Tensor
    lengths: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor

    def argument(self, states: torch.Tensor) -> Any:
        """Return the argument for these sequences. Raise if `states` lacks one of their states."""
        sequences = _Sequences(*(tensor.data_ptr() for tensor in self), len(self.lengths))
        if not library().tpc_has_states(ctypes.byref(sequences), ctypes.c_int64(len(states))):
            read, write = self.read.tolist(), self.write.tolist()
            raise IndexError(f"{len(states)} states do not contain those of {read} and {write}")
        return sequences

    @property
    def mean_tokens(self) -> int:
        """The number of tokens of a sequence, on average."""
        return int(self.starts[-1]) // max(1, len(self.lengths))


_Sequences = structure(*fields_of(ADDRESS, *Sequences._fields), ("count", NUMBER))
_ConvolutionOf = structure(
    ("x", Heads), *fields_of(ADDRESS, "weight", "bias", "tails", "out"),
    *fields_of(NUMBER, "channels", "taps", "tail_stride"), ("sequences", _Sequences),
)  # fmt: skip
_DeltaRuleOf = structure(
    *fields_of(Heads, "q", "k", "v"),
    *fields_of(ADDRESS, "decay", "share", "states", "out", "k_heads"),
    *fields_of(NUMBER, "heads", "key_width", "width", "state_stride"), ("sequences", _Sequences),
)  # fmt: skip


def takes_channels(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tails: torch.Tensor
) -> bool:
    """Return whether the kernels take the channels of a convolution."""
    whole = weight.is_contiguous() and tails[0].is_contiguous()
    return whole and takes(x, weight, tails) and (bias is None or takes(bias))


def takes_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, states: torch.Tensor) -> bool:
    """Return whether the kernels take the heads of a delta rule."""
    return states[0].is_contiguous() and takes(q, k, v) and v.shape[-1] % _LANES == 0


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Compute `resumed_conv` of one layer's `tails[states, taps - 1, channels]`."""
    out = torch.empty(x.shape, dtype=x.dtype)
    arguments = _ConvolutionOf(
        *(Heads.of(x), weight.data_ptr(), None if bias is None else bias.data_ptr()),
        *(tails.data_ptr(), out.data_ptr()),
        *(x.shape[1], weight.shape[-1], tails.stride(0), sequences.argument(tails)),
    )
    parts = -(-x.shape[1] // _CHANNELS)
    values = min(_CHANNELS, x.shape[1]) * weight.shape[-1]
    items, item_values = len(sequences.lengths) * parts, sequences.mean_tokens * values
    run(Operation.CONVOLUTION, arguments, items, item_values)
    return out


def rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    sequences: Sequences,
    k_heads: Sequence[int] | None,
) -> torch.Tensor:
    """Compute `resumed_delta_rule` of one layer's `states[states, heads, key width, width]`.

    Each token is a step of the recurrence.
    """
    heads, width = v.shape[1:]
    out = torch.empty(v.shape, dtype=v.dtype)
    factors, shares = decay.exp().contiguous(), beta.float().contiguous()
    read = torch.tensor(list(heads_read(heads, k.shape[1], k_heads)))
    arguments = _DeltaRuleOf(
        *map(Heads.of, (q, k, v)),
        *(tensor.data_ptr() for tensor in (factors, shares, states, out, read)),
        *(heads, k.shape[-1], width, states.stride(0), sequences.argument(states)),
    )
    parts = -(-width // _COLUMNS)
    values = sequences.mean_tokens * k.shape[-1] * min(width, _COLUMNS)
    run(Operation.DELTA_RULE, arguments, len(sequences.lengths) * heads * parts, values)
    return out
