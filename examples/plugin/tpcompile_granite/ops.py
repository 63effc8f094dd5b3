"""An op: embedding with a scale."""

import torch

from tpcompile.ir.ops import VOCAB_EMBEDDING
from tpcompile.ir.ops.composite import composite


def scaled_embedding(
    weight: torch.Tensor, ids: torch.Tensor, scale: float, first_row: int = 0
) -> torch.Tensor:
    """Look up ids in a table or a part of it, and multiply by a number."""
    rows: torch.Tensor = VOCAB_EMBEDDING(weight, ids, first_row) * scale
    return rows


SCALED_EMBEDDING = composite(
    scaled_embedding,
    written=lambda weight, ids, scale, first_row: (
        f"tpc.vocab_embedding({weight}, {ids}, {first_row}) * {scale}"
    ),
)
