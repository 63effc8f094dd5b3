"""The ranks as an emitted module sees them: the four things that it asks of the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.ops.argmax import best_of
from tpcompile.ir.ops.collectives import tree_sum


class Group(Protocol):
    """What an emitted module calls."""

    def all_reduce(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum of every rank's `x`, in `dtype`."""
        ...

    def all_gather(
        self, x: torch.Tensor, dim: int, extents: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Every rank's `x` along `dim`; without `extents` they are even runs of tokens."""
        ...

    def reduce_scatter(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's run of tokens of the sum."""
        ...

    def argmax(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The id of the greatest of all ranks' `values`, for each row: see `best_of`."""
        ...


class SimulatedGroup:
    """Ranks that are threads of one process; they meet at a barrier."""

    def __init__(self, ranks: int) -> None:
        self._slots: list[torch.Tensor | None] = [None] * ranks
        self._barrier = threading.Barrier(ranks)
        self.lock = threading.Lock()
        """Held for a whole run: two callers must not meet at one barrier."""

    def rank(self, rank: int) -> _SimulatedRank:
        return _SimulatedRank(self, rank)

    def abort(self) -> None:
        """Let the others fail too rather than wait for a rank that has failed."""
        self._barrier.abort()

    def reset(self) -> None:
        """Ready for another run, when no rank is running."""
        self._barrier.reset()

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[rank] = x
        self._barrier.wait()
        found = [slot for slot in self._slots if slot is not None]
        self._barrier.wait()
        return found


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
            raise ValueError(f"ranks hold {[tuple(p.shape) for p in parts]}, not {extents}")
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        parts = self._group.exchange(self._rank, x)
        start, stop = TokenLayout(len(parts)).run(self._rank, len(x))
        return tree_sum([part[start:stop] for part in parts], dtype)

    def argmax(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        both = self._group.exchange(self._rank, torch.stack([values.double().view(ids.dtype), ids]))
        pairs = torch.stack(both, 1)
        return best_of(pairs[0].view(torch.float64), pairs[1])
