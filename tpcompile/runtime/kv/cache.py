"""The KV cache for Hugging Face's `generate`: the blocks of each sequence."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import Cache

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.cache_name import CACHE
from tpcompile.runtime.kv.blocks import (
    BlockPool,
    Row,
    blocks_for,
    grow,
    slots_of,
    states_of,
    tables_of,
)


@dataclass(frozen=True)
class Appended:
    """The slots in which a step stores its K and V, and the blocks of the sequences it reads."""

    slots: torch.Tensor
    """int64 [tokens]: the slot of each new token, sequence after sequence."""
    tables: torch.Tensor
    """int64 [sequences, blocks]: the blocks of each sequence, padded with -1."""
    lengths: torch.Tensor
    """int64 [sequences]: the length of each sequence, including new tokens."""
    copies: tuple[tuple[int, int], ...]
    """Blocks to copy before the first write, as pairs (source, target)."""
    blocks: int
    """The number of blocks that the ranks must have."""
    read: torch.Tensor
    """int64 [sequences]: the state of linear attention that each sequence resumes from."""
    write: torch.Tensor
    """int64 [sequences]: the state that the step writes for each sequence."""
    states: int
    """The number of states that the ranks must have; 0 without linear attention."""

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the inputs of a graph by name."""
        inputs = {"slots": self.slots, "tables": self.tables, "lengths": self.lengths}
        return inputs | ({"read": self.read, "write": self.write} if self.states else {})


@dataclass
class Guesses:
    """The numbers of guessed tokens."""

    drafted: int = 0
    accepted: int = 0


class PagedCache(Cache):
    """The KV cache of one batch. K and V are stored on the ranks; this holds their block ids.

    Only tokens are stored, not padding. Hugging Face counts columns, padding included, and so do
    `get_seq_length` and `crop`; `max_seq_len` limits the tokens of a row.

    Copies share blocks until one of them writes. Blocks before a sliding window are kept: other
    layers may attend to the whole sequence, and `crop` may return to them.
    """

    def __init__(
        self, pool: BlockPool, layers: int, max_seq_len: int, max_batch: int | None = None
    ) -> None:
        # Not `super().__init__`, which creates one object per layer to hold tensors.
        self.layer_class_to_replicate = None
        self.offloading = False
        self.pool = pool
        self._depth = layers
        self._max_seq_len = max_seq_len
        self._max_batch = max_batch
        self.real = torch.ones(0, 0, dtype=torch.bool)
        """Boolean [batch, columns]: true for tokens, false for padding. Never changed in place."""
        self._rows: list[Row] = []
        """Only changed in place: the finaliser refers to this list."""
        self.temporary = False
        """Whether `generate` created the cache and drops it when it returns."""
        self.guesses: Guesses | None = None
        """The counts of guesses during assisted decoding, when all tokens with requested logits but
        the first are guesses; otherwise None."""
        weakref.finalize(self, pool.abandon, self._rows).atexit = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each row in the cache."""
        return tuple(row.length for row in self._rows)

    @property
    def room(self) -> int:
        """The number of tokens that every row can still take."""
        return self._max_seq_len - max(self.lengths, default=0)

    @contextmanager
    def append(self, real: torch.Tensor, batch: int | None = None) -> Iterator[Appended]:
        """Make room for new columns; `real` [batch, new] is true for tokens, false for padding.

        `batch` is the number of input rows if several sequences are packed into a row, because
        `max_batch` limits rows, not sequences. Keep the context open while the step runs: if the
        step raises, the cache is restored.
        """
        real = real.to("cpu", torch.bool)
        new = [sum(row) for row in real.tolist()]
        self._check_batch(len(new) if batch is None else batch)
        before, columns = held = list(self._rows), self.real
        if not self.is_initialized:
            before, columns = [Row()] * len(new), real.new_ones(len(new), 0)
        self._check_lengths(before, new)
        growth = grow(self.pool, before, new)
        self._rows[:], self.real = growth.rows, torch.cat([columns, real], 1)
        try:
            yield Appended(
                slots_of(before, growth.rows, self.pool.block),
                tables_of(growth.rows),
                torch.tensor(self.lengths, dtype=torch.long),
                growth.copies,
                self.pool.blocks,
                states_of(before),
                states_of(growth.rows),
                self.pool.states.blocks if self.pool.states is not None else 0,
            )
        except BaseException:
            self._rows[:], self.real = held
            growth.undo(self.pool, before)
            raise
        growth.finish(self.pool, before)

    def _check_batch(self, batch: int) -> None:
        if self.is_initialized and batch != len(self._rows):
            raise UsageError(
                "The batch must have as many sequences as the KV cache",
                got=f"a batch of {batch}",
                expected=f"a batch of {len(self._rows)}",
                hint=f"Start without {CACHE}, or call its batch_repeat_interleave",
            )
        if self._max_batch is not None and batch > self._max_batch:
            raise UsageError(
                f"The batch must have at most max_batch={self._max_batch} sequences",
                got=f"{batch} sequences",
                hint="Beams and return sequences count too: compile with a larger max_batch",
            )

    def _check_lengths(self, rows: Sequence[Row], new: Sequence[int]) -> None:
        for index, (row, more) in enumerate(zip(rows, new, strict=True)):
            if row.length + more > self._max_seq_len:
                raise UsageError(
                    f"A sequence must have at most max_seq_len={self._max_seq_len} tokens",
                    where=f"row {index} of the batch" if len(rows) > 1 else "",
                    got=f"{row.length + more} tokens",
                    hint=f"Compile with max_seq_len={row.length + more} or more",
                )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns, padding included; it is the same for every layer."""
        return self.real.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the maximum number of tokens of a row."""
        return self._max_seq_len

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` columns; if it is positive, keep that many columns instead."""
        columns, count = self.get_seq_length(), int(tokens_to_remove)
        remaining = count if count > 0 else max(0, columns + count)
        if remaining >= columns:
            return
        if remaining and self.pool.states is not None:
            raise UnsupportedError(
                "A KV cache of a model with linear attention cannot be cropped",
                got=f"{remaining} of {columns} columns to keep",
                expected="0 columns to keep, because earlier states are not stored",
                hint="Copy the cache with copy.deepcopy before you add tokens that may be removed",
            )
        if self.guesses is not None:
            self.guesses.accepted -= columns - remaining
        self.real = self.real[:, :remaining]
        for index, length in enumerate(self.real.sum(1).tolist()):
            row = self._rows[index]
            held = blocks_for(length, self.pool.block)
            self._rows[index] = Row(row.blocks[:held], length)
            self.pool.free(row.blocks[held:])
            self.pool.free_state(row)

    def reset(self) -> None:
        """Clear the cache; the next batch may have any size."""
        self.crop(-self.get_seq_length())
        self._rows.clear()
        self.real = self.real[:0]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue row `i` from the old row `beam_idx[i]`."""
        self._choose(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies of a row are adjacent."""
        self._choose(torch.arange(len(self._rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows."""
        self._choose(indices)

    def _choose(self, indices: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        places = torch.arange(len(self._rows))
        try:
            chosen = places[torch.as_tensor(indices, device="cpu")]
        except IndexError as error:
            raise UsageError(
                f"Row indices of the KV cache must be from 0 to {len(places) - 1}: {error}"
            ) from error
        before = list(self._rows)
        rows = [before[index] for index in chosen.tolist()]
        for row in rows:
            self.pool.share_row(row)
        self._rows[:], self.real = rows, self.real[chosen]
        for row in before:
            self.pool.free_row(row)

    def activate_past_recording(self) -> None:
        """No-op: all past keys and values are stored, and past states never are."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.is_croppable

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_tensors()

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        raise _no_tensors()

    @property
    def batch_size(self) -> int:
        """The number of rows; -1 while the cache is empty."""
        return len(self._rows) if self.is_initialized else -1

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return self.pool.states is None

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self._depth

    @property
    def is_linear(self) -> list[bool]:
        return [False] * self._depth

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * self._depth

    def __len__(self) -> int:
        return self._depth

    def __repr__(self) -> str:
        return f"PagedCache(layers={self._depth}, lengths={list(self.lengths)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        copied = PagedCache(self.pool, self._depth, self._max_seq_len, self._max_batch)
        for row in self._rows:
            self.pool.share_row(row)
        copied._rows[:], copied.real = self._rows, self.real
        memo[id(self)] = copied
        return copied

    def __copy__(self) -> PagedCache:
        # A shallow copy would free the shared blocks when it is deleted.
        return self.__deepcopy__({})

    def __reduce__(self) -> NoReturn:
        raise _no_tensors()


def _no_tensors() -> UnsupportedError:
    return UnsupportedError(
        "This KV cache holds no tensors: K and V are stored on the ranks of the compiled model",
        hint=f"Pass it as {CACHE} only to that model; copy it with copy.deepcopy",
    )
