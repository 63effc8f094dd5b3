"""Linears with the kernels and weight layouts that suit this machine.

All kernels accumulate in fp32 and round once, but they choose the order of the sum. So results may
differ in the last bit between layouts, and between numbers of tokens.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from tpcompile.ir.ops import EXPERTS, SPECS
from tpcompile.ir.ops.elementwise import swiglu
from tpcompile.ir.ops.few_bits import DecodedExperts, RoundingWeight

_mkldnn = torch.ops.mkldnn

_FEW = 64
"""The most tokens for which a product is faster with the weight as its left operand."""


def as_matrix(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight reordered if that is faster, otherwise the weight itself."""
    if weight.device.type != "cpu" or not weight.numel() or not _reorders(weight.dtype):
        return weight
    with torch.inference_mode():
        reordered: torch.Tensor = _mkldnn._reorder_linear_weight(weight.detach(), 1)
    return reordered


def linear(
    x: torch.Tensor, weight: torch.Tensor | RoundingWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply `torch.nn.functional.linear` to a weight that may be reordered, or rounds inputs."""
    if isinstance(weight, RoundingWeight):
        return weight.linear(x, bias)
    if weight.is_mkldnn:
        product: torch.Tensor = _mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    few = weight.device.type == "cpu" and x.dim() == 2 and 0 < len(x) <= _FEW
    if few and _puts_weight_first(weight.dtype):
        return _of_few(x, weight, bias)
    return functional.linear(x, weight, bias)


def linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor | RoundingWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the SwiGLU of both halves of a linear."""
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
    return SPECS[EXPERTS].reference(x, scores, ids, gate_up, down, first, linear)  # type: ignore[no-any-return]


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight row by row."""
    return weight.to_dense() if weight.is_mkldnn else weight


def _of_few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply the weight with the transposed tokens, so that it is not reordered in each call."""
    if len(x) == 1:
        product = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
        return product[None]
    if bias is None:
        return torch.mm(weight, x.t()).t().contiguous()
    return torch.addmm(bias[:, None], weight, x.t()).t().contiguous()


def _reorders(dtype: torch.dtype) -> bool:
    """Return whether reordered weights are faster: in bf16 without tiles, by up to a half."""
    return dtype == torch.bfloat16 and _has_bf16() and not _has_tiles()


def _puts_weight_first(dtype: torch.dtype) -> bool:
    """Return whether few tokens are faster as the right operand: in bf16 with tiles, by a half."""
    return dtype == torch.bfloat16 and _has_bf16() and _has_tiles()


@cache
def _has_bf16() -> bool:
    return bool(torch._C._has_mkldnn and _mkldnn._is_mkldnn_bf16_supported())


@cache
def _has_tiles() -> bool:
    """Return whether the CPU has AMX."""
    return bool(torch.cpu._is_amx_tile_supported())
