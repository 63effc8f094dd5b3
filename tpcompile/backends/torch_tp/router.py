"""The choice of experts as a module, whose hooks can read and replace choices."""

from __future__ import annotations

import torch
from torch import nn

from tpcompile.ir.ops.experts import top_experts


class Router(nn.Module):
    """The choice of a layer's experts."""

    def forward(
        self, logits: torch.Tensor, count: int, normalized: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `top_experts`."""
        return top_experts(logits, count, normalized)
