"""The sequences of a batch, and the blocks that store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tpcompile.errors import UsageError


@dataclass(frozen=True)
class Texts:
    """The tokens of each sequence, the last of which is new, and its blocks in the cache."""

    tokens: tuple[torch.Tensor, ...]
    tables: torch.Tensor
    block: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.tokens))

    @property
    def slots(self) -> int:
        """The number of slots of the cache."""
        return self.tables.numel() * self.block

    @property
    def states(self) -> torch.Tensor:
        """The state of linear attention of each sequence, which it reads and writes."""
        return torch.arange(len(self.tokens))

    def visible_counts(self, window: int | None) -> tuple[int, ...]:
        """Return the number of tokens per sequence that the new one sees, including itself."""
        return tuple(length if window is None else min(length, window) for length in self.lengths)

    def places(self, sequence: int, first: int, last: int) -> torch.Tensor:
        """Return the slots of the tokens from `first` up to `last`."""
        tokens = torch.arange(first, last)
        return self.tables[sequence][tokens // self.block] * self.block + tokens % self.block

    def going_on(self, tokens: torch.Tensor) -> Texts:
        """Return the sequences, extended by one token each."""
        longer = (torch.cat([old, new]) for old, new in zip(self.tokens, tokens, strict=True))
        return replace(self, tokens=tuple(longer))

    def before(self) -> dict[str, torch.Tensor]:
        """Return the graph inputs that fill the cache: all tokens but the new ones."""
        return self._inputs([(0, length - 1) for length in self.lengths])

    def new(self) -> dict[str, torch.Tensor]:
        """Return the graph inputs of the step itself: the new tokens."""
        return self._inputs([(length - 1, length) for length in self.lengths])

    def _inputs(self, runs: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        counts = torch.tensor([last - first for first, last in runs])
        places = [self.places(row, *run) for row, run in enumerate(runs)]
        ids = [text[slice(*run)] for text, run in zip(self.tokens, runs, strict=True)]
        return {
            "input_ids": torch.cat(ids),
            "positions": torch.cat([torch.arange(*run) for run in runs]),
            "starts": torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            "logit_rows": torch.arange(int(counts.sum())),
            "slots": torch.cat(places),
            "tables": self.tables,
            "lengths": torch.tensor([last for _, last in runs]),
            "read": self.states,
            "write": self.states,
        }


def random_ids(lengths: Sequence[int], vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """Draw tokens, `[sequences, longest]`. Raise unless there are sequences, each with a token."""
    if not lengths or min(lengths) < 1:
        raise UsageError(
            "The batch or one of its sequences is empty",
            expected="one or more sequences of at least one token",
        )
    return torch.randint(vocabulary, (len(lengths), max(lengths)), generator=generator)


def random_texts(
    lengths: Sequence[int], steps: int, vocabulary: int, block: int, seed: int
) -> Texts:
    """Generate random tokens in scattered blocks, with room for all steps."""
    generator = torch.Generator().manual_seed(seed)
    ids = random_ids(lengths, vocabulary, generator)
    most = -(-(max(lengths) + steps - 1) // block)
    dealt = torch.randperm(len(lengths) * most, generator=generator)
    rows = (row[:length] for row, length in zip(ids, lengths, strict=True))
    return Texts(tuple(rows), dealt.view(len(lengths), most), block)
