"""From a padded batch to the flat run of tokens that graphs take, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpcompile.errors import UsageError


@dataclass(frozen=True)
class Packed:
    """The real tokens of a batch, one sequence after the other; padding is left out."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    logit_rows: torch.Tensor
    kept: torch.Tensor
    """Boolean [batch, kept columns]: which of the wanted logits belong to a real token."""

    def inputs(self) -> dict[str, torch.Tensor]:
        """The inputs of a graph by name, in its order."""
        return {
            "input_ids": self.input_ids,
            "positions": self.positions,
            "starts": self.starts,
            "logit_rows": self.logit_rows,
        }

    def unpack(self, logits: torch.Tensor) -> torch.Tensor:
        """[batch, kept columns, vocabulary]; zeros at padding."""
        whole = logits.new_zeros(*self.kept.shape, logits.shape[-1])
        whole[self.kept] = logits
        return whole


def pack(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    logits_to_keep: int | torch.Tensor = 0,
) -> Packed:
    """Hugging Face's arguments as the inputs of a graph; padding may be on either side."""
    if input_ids.dim() != 2 or not input_ids.numel():
        raise UsageError("input_ids must be [batch, length]", got=f"shape {tuple(input_ids.shape)}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise UsageError(
            "attention_mask must mark the padding of input_ids",
            got=f"shape {tuple(mask.shape)}",
            expected=f"shape {tuple(input_ids.shape)}",
        )
    real = mask.bool()
    lengths = real.sum(1)
    if bool((lengths == 0).any()):
        raise UsageError("A sequence of the batch is all padding")
    if position_ids is None and bool((real.int().diff(dim=1).abs().sum(1) > 1).any()):
        _refuse_holes(real)
    if position_ids is not None and position_ids.shape[-1:] != input_ids.shape[-1:]:
        raise UsageError(
            "position_ids must give a position for each of input_ids",
            got=f"shape {tuple(position_ids.shape)}",
            expected=f"shape {tuple(input_ids.shape)}",
        )
    places = real.cumsum(1) - 1
    positions = places if position_ids is None else position_ids.expand_as(input_ids)
    columns = torch.arange(input_ids.shape[1])
    kept_columns = (
        columns[-logits_to_keep:] if isinstance(logits_to_keep, int) else (columns[logits_to_keep])
    )
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    kept = real[:, kept_columns]
    rows = (starts[:-1, None] + places)[:, kept_columns][kept]
    return Packed(input_ids[real], positions[real], starts, rows, kept)


def _refuse_holes(real: torch.Tensor) -> None:
    """Padding stands on one side, or on both; what lies between is one run of tokens."""
    for row in real:
        columns = row.nonzero().squeeze(1)
        if int(columns[-1] - columns[0]) + 1 != len(columns):
            raise UsageError(
                "attention_mask has a hole: padding between real tokens",
                hint="Give position_ids too, to say where the tokens behind the hole stand",
            )
