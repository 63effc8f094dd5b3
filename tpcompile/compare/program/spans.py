"""A plain implementation of attention in spans for one new token: the expected partials."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpcompile.compare.groups import Pieces
from tpcompile.ir.ops.decode import span_of


@dataclass(frozen=True)
class AttentionInput:
    """The query heads of a new token, and the keys and values that it sees: `[…, heads, width]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float


def put_spans(
    pieces: Pieces,
    layer: int,
    visible: list[AttentionInput],
    lengths: tuple[int, ...],
    spans: int,
    block: int,
) -> None:
    """Add each sequence's partials. `visible` has its visible tokens; `lengths` counts all."""
    parts = [
        _spans(tokens, length, spans, block)
        for tokens, length in zip(visible, lengths, strict=True)
    ]
    for name, part in zip(("partial_values", "partial_lse"), zip(*parts, strict=True), strict=True):
        pieces.deal((name, layer), torch.stack(part).flatten(1), "attention in spans")


def _spans(
    visible: AttentionInput, length: int, spans: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values `[heads, spans, width]` and log-sum-exp `[heads, spans]`, in fp32."""
    heads, width = visible.q.shape
    held, shared = visible.k.shape[:2]
    values = torch.zeros(heads, spans, width)
    lse = torch.full((heads, spans), -torch.inf)
    k, v = (side.float().repeat_interleave(heads // shared, 1) for side in (visible.k, visible.v))
    scores = torch.einsum("hw,thw->ht", visible.q.float(), k) * visible.scale
    for span in range(spans):
        first, last = span_of(length, block, span, spans, held if held < length else None)
        if first < last:
            tokens = slice(first - (length - held), last - (length - held))
            lse[:, span] = scores[:, tokens].logsumexp(-1)
            values[:, span] = torch.einsum("ht,thw->hw", scores[:, tokens].softmax(-1), v[tokens])
    return values, lse
