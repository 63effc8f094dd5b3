"""The collectives that an emitted module calls, and their simulation by threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.ops.argmax import best_of
from tpcompile.ir.ops.collectives import tree_sum


class Group(Protocol):
    """The four collectives that an emitted module calls."""

    def all_reduce(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the sum of every rank's `x`, in `dtype`."""
        ...

    def all_gather(
        self, x: torch.Tensor, dim: int, extents: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Concatenate every rank's `x` along `dim`; `extents` are their sizes, if known."""
        ...

    def reduce_scatter(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return this rank's run of tokens of the sum of every rank's `x`."""
        ...

    def argmax(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the id of the greatest of all ranks' `values` for each row; see `best_of`."""
        ...


class SimulatedGroup:
    """A group whose ranks are threads of one process, synchronised by a barrier."""

    def __init__(self, ranks: int) -> None:
        self._slots: list[torch.Tensor | None] = [None] * ranks
        self._barrier = threading.Barrier(ranks)
        self.lock = threading.Lock()
        """Held for a whole run: two callers must not share the barrier."""

    def rank(self, rank: int) -> _SimulatedRank:
        """Return this rank's view of the group."""
        return _SimulatedRank(self, rank)

    def abort(self) -> None:
        """Make all other ranks fail after one has failed, so that they do not deadlock."""
        self._barrier.abort()

    def reset(self) -> None:
        """Prepare for another run; no rank may be running."""
        self._barrier.reset()

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `x`, by rank."""
        self._slots[rank] = x
        self._barrier.wait()
        values = [slot for slot in self._slots if slot is not None]
        self._barrier.wait()
        return values


class _SimulatedRank:
    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def all_reduce(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return tree_sum(self._group.exchange(self._rank, x), dtype)

    def all_gather(
        self, x: torch.Tensor, dim: int, extents: Sequence[int] | None = None
    ) -> torch.Tensor:
        parts = self._group.exchange(self._rank, x)
        if extents is not None and [part.shape[dim] for part in parts] != list(extents):
            raise ValueError(
                f"sizes along dim {dim} must be {list(extents)}, "
                f"got shapes {[tuple(p.shape) for p in parts]}"
            )
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        parts = self._group.exchange(self._rank, x)
        start, stop = TokenLayout(len(parts)).run(self._rank, len(x))
        return tree_sum([part[start:stop] for part in parts], dtype)

    def argmax(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        local_pairs = torch.stack([values.double().view(ids.dtype), ids])
        pairs = torch.stack(self._group.exchange(self._rank, local_pairs), 1)
        return best_of(pairs[0].view(torch.float64), pairs[1])
