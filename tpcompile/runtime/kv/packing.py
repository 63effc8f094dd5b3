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
    real: torch.Tensor
    """Boolean [batch, columns]: which of the ids are tokens."""
    sequences: torch.Tensor
    """Boolean [sequences, columns]: the same tokens with one sequence per row."""
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

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """[batch, kept columns, …] of what was computed a logit row; zeros at padding."""
        whole = rows.new_zeros(*self.kept.shape, *rows.shape[1:])
        whole[self.kept.to(rows.device)] = rows
        return whole


def pack(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    logits_to_keep: int | torch.Tensor = 0,
    cached: torch.Tensor | None = None,
    split: bool = False,
) -> Packed:
    """Hugging Face's arguments as the inputs of a graph; padding may be on either side.

    `cached` says which columns before those of `input_ids` are tokens that a KV cache holds.
    `split` starts a new sequence wherever a position does not follow the one before it.
    """
    if input_ids.dim() != 2 or not input_ids.numel():
        raise UsageError("input_ids must be [batch, length]", got=f"shape {tuple(input_ids.shape)}")
    if position_ids is not None and position_ids.shape[-1:] != input_ids.shape[-1:]:
        raise UsageError(
            "position_ids must give a position for each of input_ids",
            got=f"shape {tuple(position_ids.shape)}",
            expected=f"shape {tuple(input_ids.shape)}",
        )
    nothing = torch.ones(len(input_ids), 0, dtype=torch.bool)
    before = nothing if cached is None or not cached.shape[1] else cached
    real = _real(input_ids, attention_mask, before)
    if cached is None and not bool(real.any(1).all()):
        raise UsageError("A sequence of the batch is all padding")
    lengths = real.sum(1)
    if position_ids is None:
        _refuse_holes(torch.cat([before, real], 1))
    places = real.cumsum(1) - 1
    counted = places + before.sum(1, keepdim=True)
    positions = counted if position_ids is None else position_ids.expand_as(input_ids)
    columns = torch.arange(input_ids.shape[1])
    kept_columns = (
        columns[-logits_to_keep:] if isinstance(logits_to_keep, int) else columns[logits_to_keep]
    )
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    kept = real[:, kept_columns]
    rows = (starts[:-1, None] + places)[:, kept_columns][kept]
    sequences = real
    if split:
        starts = _split(positions)
        lengths = starts.diff()
        sequences = torch.arange(int(lengths.max())) < lengths[:, None]
    return Packed(input_ids[real], positions[real], starts, rows, real, sequences, kept)


def packs_sequences(attention_mask: object, past_key_values: object, use_cache: bool) -> bool:
    """Whether Hugging Face looks for sequences packed into a row by their positions.

    It does so without a mask and without a cache; `use_cache` makes one before the masks.
    """
    return attention_mask is None and past_key_values is None and not use_cache


def _split(positions: torch.Tensor) -> torch.Tensor:
    """Where each sequence of a batch without padding starts, and the number of tokens."""
    first = torch.ones_like(positions, dtype=torch.bool)
    first[:, 1:] = positions.diff(dim=1) != 1
    starts = first.flatten().nonzero().squeeze(1)
    return torch.cat([starts, starts.new_tensor([positions.numel()])])


def _real(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, before: torch.Tensor
) -> torch.Tensor:
    """Which of the ids are tokens; what was cached must be masked as it was then."""
    batch, past = before.shape
    if batch != len(input_ids):
        raise UsageError(
            "past_key_values holds another batch",
            got=f"{len(input_ids)} sequences",
            expected=f"{batch}, as many as it holds",
        )
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask.shape != (batch, past + input_ids.shape[1]):
        raise UsageError(
            "attention_mask must mark the padding of input_ids"
            + (" and of all that came before" if past else ""),
            got=f"shape {tuple(attention_mask.shape)}",
            expected=f"shape {(batch, past + input_ids.shape[1])}",
        )
    whole = attention_mask.bool()
    if past and not torch.equal(whole[:, :past], before):
        raise UsageError(
            "attention_mask masks other tokens than when they went into past_key_values",
            hint="Give the same mask again, with ones for the new tokens behind",
        )
    return whole[:, past:]


def _refuse_holes(real: torch.Tensor) -> None:
    """Padding stands on one side, or on both; what lies between is one run of tokens."""
    if bool((real.int().diff(dim=1).abs().sum(1) <= 1).all()):
        return
    for row in real:
        columns = row.nonzero().squeeze(1)
        if len(columns) and int(columns[-1] - columns[0]) + 1 != len(columns):
            raise UsageError(
                "attention_mask has a hole: padding between real tokens",
                hint="Give position_ids too, to say where the tokens behind the hole stand",
            )
