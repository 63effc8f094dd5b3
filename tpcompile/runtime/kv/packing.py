"""Conversion of a padded batch to the flat tokens that graphs take, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpcompile.errors import UsageError


@dataclass(frozen=True)
class Packed:
    """The tokens of a batch, sequence after sequence, without padding."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    logit_rows: torch.Tensor
    real: torch.Tensor
    """Boolean [batch, columns]: true for tokens, false for padding."""
    sequences: torch.Tensor
    """Boolean [sequences, columns]: the same with one sequence per row."""
    columns: int
    """The number of columns whose logits are requested."""
    real_columns: torch.Tensor | None
    """Boolean [batch, columns]: true where the logits belong to a token; None if all do."""

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the inputs of a graph by name, in the order of the graph."""
        return {
            "input_ids": self.input_ids,
            "positions": self.positions,
            "starts": self.starts,
            "logit_rows": self.logit_rows,
        }

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """Scatter one result per logit row into [batch, kept columns, …]; padding is zero.

        The result is not an inference tensor, which callers could not write to, unless they are in
        inference mode.
        """
        shape = (self.real.shape[0], self.columns, *rows.shape[1:])
        if self.real_columns is None:
            writable = torch.is_inference_mode_enabled() or not rows.is_inference()
            whole = rows.reshape(shape)
            return whole if writable else whole.clone()
        whole = rows.new_zeros(shape)
        whole[self.real_columns.to(rows.device)] = rows
        return whole


def pack(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    columns: Sequence[int] | None = None,
    cached: torch.Tensor | None = None,
    split: bool = False,
) -> Packed:
    """Convert Hugging Face's arguments to graph inputs; padding may be on either side.

    `columns` are those of `input_ids` whose logits are requested, by default all of them.
    `cached` marks the tokens among the columns before `input_ids`, which a KV cache holds.
    `split` starts a new sequence wherever a position does not follow the one before it.
    """
    if input_ids.dim() != 2 or not input_ids.numel():
        raise UsageError(
            "input_ids must have shape [batch, length]", got=f"shape {tuple(input_ids.shape)}"
        )
    if position_ids is not None and position_ids.shape[-1:] != input_ids.shape[-1:]:
        raise UsageError(
            "position_ids must hold one position for each of input_ids",
            got=f"shape {tuple(position_ids.shape)}",
            expected=f"shape {tuple(input_ids.shape)}",
        )
    before = cached
    if before is None or not before.shape[1]:
        before = torch.ones(input_ids.shape[0], 0, dtype=torch.bool)
    real = _real(input_ids, attention_mask, before)
    columns = range(input_ids.shape[1]) if columns is None else columns
    if not split and bool(before.all()) and (attention_mask is None or bool(real.all())):
        return _unpadded(input_ids, position_ids, columns, real, before.shape[1])
    if cached is None and not bool(real.any(1).all()):
        raise UsageError(
            "Every sequence of the batch must have a token, got one that is all padding"
        )
    lengths = real.sum(1)
    if position_ids is None:
        _refuse_holes(torch.cat([before, real], 1))
    places = real.cumsum(1) - 1
    counted = places + before.sum(1, keepdim=True)
    positions = counted if position_ids is None else position_ids.expand_as(input_ids)
    chosen = torch.tensor(columns, dtype=torch.long)
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    chosen_real = real[:, chosen]
    rows = (starts[:-1, None] + places)[:, chosen][chosen_real]
    sequences = real
    if split:
        starts = _split(positions)
        lengths = starts.diff()
        sequences = torch.arange(int(lengths.max())) < lengths[:, None]
    return Packed(
        input_ids[real], positions[real], starts, rows, real, sequences, len(columns), chosen_real
    )


def _unpadded(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    columns: Sequence[int],
    real: torch.Tensor,
    past: int,
) -> Packed:
    """Convert a batch without padding, `past` columns of which are cached.

    These are the numbers as for any batch, by fewer operations. Around a decode step, whose weights
    have displaced their code from the caches, each operation takes several microseconds.
    """
    batch, length = input_ids.shape
    starts = range(0, batch * length + 1, length)
    if position_ids is None:
        positions = torch.tensor([*range(past, past + length)] * batch)
    else:
        positions = position_ids.expand_as(input_ids).flatten()
    rows = [start + column for start in starts[:-1] for column in columns]
    return Packed(
        input_ids.flatten(),
        positions,
        torch.tensor(starts),
        torch.tensor(rows, dtype=torch.long),
        real,
        real,
        len(columns),
        None,
    )


def packs_sequences(attention_mask: object, past_key_values: object, use_cache: bool) -> bool:
    """Return whether Hugging Face uses positions to find several sequences packed into a row.

    It does so only without a mask and without a cache; `use_cache` creates a cache before the mask.
    """
    return attention_mask is None and past_key_values is None and not use_cache


def _split(positions: torch.Tensor) -> torch.Tensor:
    """Return the start of each sequence of an unpadded batch, followed by the number of tokens."""
    first = torch.ones_like(positions, dtype=torch.bool)
    first[:, 1:] = positions.diff(dim=1) != 1
    starts = first.flatten().nonzero().squeeze(1)
    return torch.cat([starts, starts.new_tensor([positions.numel()])])


def _real(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, before: torch.Tensor
) -> torch.Tensor:
    """Return which ids are tokens; raise if the mask of the cached columns has changed."""
    batch, past = before.shape
    if batch != input_ids.shape[0]:
        raise UsageError(
            "The batch must have as many sequences as the KV cache",
            got=f"a batch of {input_ids.shape[0]}",
            expected=f"a batch of {batch}",
        )
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask.shape != (batch, past + input_ids.shape[1]):
        raise UsageError(
            "attention_mask must mark the padding of input_ids"
            + (" and of all columns before" if past else ""),
            got=f"shape {tuple(attention_mask.shape)}",
            expected=f"shape {(batch, past + input_ids.shape[1])}",
        )
    whole = attention_mask.bool()
    if past and not torch.equal(whole[:, :past], before):
        raise UsageError(
            "attention_mask must mark the same cached tokens as in earlier calls",
            hint="Extend the mask of the earlier calls with ones for the new tokens",
        )
    return whole[:, past:]


def _refuse_holes(real: torch.Tensor) -> None:
    """Raise unless the tokens of each row are one run; padding may be on both sides."""
    if bool((real.int().diff(dim=1).abs().sum(1) <= 1).all()):
        return
    for row in real:
        columns = row.nonzero().squeeze(1)
        if len(columns) and int(columns[-1] - columns[0]) + 1 != len(columns):
            raise UsageError(
                "attention_mask must not have padding between tokens",
                hint="Pass position_ids too, with the positions of the tokens after the padding",
            )
