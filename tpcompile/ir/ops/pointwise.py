"""Activations whose bits do not depend on the place of an element in a tensor.

Torch's own kernels vectorize these on a CPU, and compute the last elements of each thread with
other instructions, which round differently. A token's bits would depend on the number of tokens.
Its `exp`, `log1p`, `tanh` and `erfc` compute all elements alike.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional


def silu(x: torch.Tensor) -> torch.Tensor:
    """Compute `x sigmoid(x)`."""
    if x.device.type != "cpu":
        return functional.silu(x)
    wide = x.float()
    return wide.div(_one_plus_exp(-wide)).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Compute `1 / (1 + exp(-x))`."""
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return _one_plus_exp(-x.float()).reciprocal_().to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Compute `log(1 + exp(x))`, which is `x` above torch's threshold."""
    if x.device.type != "cpu":
        return functional.softplus(x)
    wide = x.float()
    return torch.where(wide > 20, wide, wide.exp().log1p_()).to(x.dtype)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Compute `x` times the normal distribution up to `x`, or its approximation by `tanh`."""
    if x.device.type != "cpu":
        return functional.gelu(x, approximate=approximate)
    wide = x.float()
    if approximate == "none":
        share = wide.mul(-math.sqrt(0.5)).erfc_()
    else:
        cubic = wide * wide * wide * 0.044715
        share = wide.add(cubic).mul_(math.sqrt(2 / math.pi)).tanh_().add_(1)
    return share.mul_(0.5).mul_(wide).to(x.dtype)


def _one_plus_exp(x: torch.Tensor) -> torch.Tensor:
    return x.exp_().add_(1)
