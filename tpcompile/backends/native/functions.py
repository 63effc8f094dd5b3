"""Functions that emitted modules call when the native backend runs decode steps.

In bf16, kernels of the native library replace torch's. They round at the same places as the
dialect's references. Activations have the same bits for any number of tokens in all dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpcompile.backends.native import delta, mixtures, products, prompts
from tpcompile.backends.native.many import takes
from tpcompile.backends.native.mixtures import DecodedExperts
from tpcompile.backends.native.products import FewBits
from tpcompile.backends.torch_tp import functions as torchs
from tpcompile.backends.torch_tp.functions import (  # noqa: F401 - modules call them from here
    Router,
    as_matrix,
    attention,
    causal_conv,
    decoded_rows,
    gated_delta_rule,
    vocab_embedding,
)
from tpcompile.ir.format import Format
from tpcompile.ir.layout import Interval
from tpcompile.ir.ops import EXPERTS, SPECS, elementwise, norm
from tpcompile.ir.ops import delta as linear_attention
from tpcompile.ir.ops.groups import heads_read, runs_of
from tpcompile.ir.ops.pointwise import gelu, sigmoid, silu, softplus  # noqa: F401 - as above

__all__ = torchs.__all__


def decoded(
    word: str, parts: Sequence[torch.Tensor], columns: Interval, dtype: torch.dtype
) -> FewBits:
    """Return a weight for `linear`, which decodes it."""
    return FewBits(Format.parsed(word), parts, columns)


def linear(
    x: torch.Tensor, weight: torch.Tensor | FewBits, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply `torch.nn.functional.linear`."""
    if len(x) and products.takes_product(x, weight, bias) and products.is_faster(weight):
        return products.linear(x, weight, bias)
    return torchs.linear(
        x, weight.decoded(x.dtype) if isinstance(weight, FewBits) else weight, bias
    )


def linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor | FewBits, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the SwiGLU of both halves of a linear."""
    if len(x) and products.takes_product(x, weight, bias) and products.is_faster(weight):
        return products.linear(x, weight, bias, swiglu=True)
    gate, up = linear(x, weight, bias).chunk(2, -1)
    return swiglu(gate, up)


def experts(
    x: torch.Tensor,
    scores: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor | DecodedExperts,
    down: torch.Tensor | DecodedExperts,
    first: int = 0,
) -> torch.Tensor:
    """See `tpcompile.ir.ops.experts`."""
    if mixtures.takes(x, gate_up, down):
        return mixtures.experts(x, scores, ids, gate_up, down, first)
    output: torch.Tensor = SPECS[EXPERTS].reference(x, scores, ids, gate_up, down, first, linear)
    return output


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> torch.Tensor:
    """See `tpcompile.ir.ops.norm`."""
    if x.dim() in (2, 3) and takes(x, weight):
        return prompts.norm(x, weight, eps, zero_centered)
    return torchs.rms_norm(x, weight, eps, zero_centered)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tpcompile.ir.ops.norm`."""
    whole = x.dim() == 2 and x.is_contiguous() and residual.is_contiguous()
    if whole and residual.dtype in (x.dtype, torch.float32) and takes(x, weight):
        return prompts.add_norm(x, residual, weight, eps, zero_centered)
    return torchs.add_rms_norm(x, residual, weight, eps, zero_centered)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `tpcompile.ir.ops.norm`."""
    if x.dim() == 3 and takes(x, gate, weight):
        return prompts.gated_norm(x, gate, weight, eps)
    return norm.gated_rms_norm(x, gate, weight, eps, silu)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `tpcompile.ir.ops.elementwise`."""
    if gate.dim() == 2 and takes(gate, up):
        return prompts.swiglu(gate, up)
    return elementwise.swiglu(gate, up, silu)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `tpcompile.ir.ops.elementwise`."""
    if x.dim() in (2, 3) and takes(x, gate):
        return prompts.sigmoid_gate(x, gate)
    return elementwise.sigmoid_gate(x, gate, sigmoid)


def delta_decay(a: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See `tpcompile.ir.ops.delta`."""
    return linear_attention.delta_decay(a, rate, bias, softplus)


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """See `tpcompile.ir.ops.rotary`."""
    whole = cos.is_contiguous() and sin.is_contiguous()
    if not interleaved and whole and takes(x, cos, sin):
        return prompts.rope(x, cos, sin)
    return torchs.rope(x, cos, sin, interleaved)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    layer: int,
    block: int,
    kv_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """See `tpcompile.ir.ops.paged_attention`."""
    if not len(q) or not prompts.takes_heads(q, k, v, cache):
        return torchs.paged_attention(
            *(q, k, v, cache, starts, slots, tables, lengths, scale, window, layer, block),
            kv_heads,
        )
    prompts.append(k, v, cache[layer], slots)
    runs = runs_of(heads_read(q.shape[1], k.shape[1], kv_heads))
    return prompts.attention(q, cache[layer], starts, tables, lengths, scale, window, block, runs)


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
    """See `tpcompile.ir.ops.resumed`."""
    sequences = delta.Sequences(starts, lengths, read, write)
    if delta.takes_channels(x, weight, bias, tails):
        return delta.convolution(x, weight, bias, tails[layer], sequences)
    return torchs.resumed_conv(x, weight, bias, tails, *sequences, layer)


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
    """See `tpcompile.ir.ops.resumed`."""
    sequences = delta.Sequences(starts, lengths, read, write)
    if delta.takes_heads(q, k, v, states):
        return delta.rule(q, k, v, decay, beta, states[layer], sequences, k_heads)
    return torchs.resumed_delta_rule(q, k, v, decay, beta, states, *sequences, layer, k_heads)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `tpcompile.ir.ops.argmax`. In bf16, numpy is ten times as fast as torch."""
    if logits.dtype != torch.bfloat16:
        return torchs.argmax(logits)
    return torch.from_numpy(logits.float().numpy().argmax(-1))


def local_argmax(logits: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tpcompile.ir.ops.argmax`."""
    return torchs.local_argmax(logits, first, argmax)
