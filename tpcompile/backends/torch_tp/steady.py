"""Gates and decays in which a token's bits depend on no other token of a step.

torch's sigmoid, SiLU and softplus compute the last few elements of a tensor by another function
than those before. So the ops would give the last token of a prompt other bits than they give it
when another prompt follows in the step.
"""

from __future__ import annotations

import torch

from tpcompile.ir.ops.norm import rms_norm


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `tpcompile.ir.ops.elementwise`."""
    return x * _sigmoid(gate).to(gate.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `tpcompile.ir.ops.norm`."""
    return (rms_norm(x, weight, eps) * (gate.float() * _sigmoid(gate))).to(x.dtype)


def delta_decay(a: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See `tpcompile.ir.ops.delta`."""
    wide = a.float() + bias.float()
    softplus = wide.clamp(min=0) + torch.log1p(torch.exp(-wide.abs()))
    return -rate.float().exp() * softplus


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x.float()))
