"""The ranks' side of a KV cache, which stores tokens instead of keys and values."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from tpcompile.runtime.kv.cache import Appended, PagedCache

BLOCK = 4


class Slots:
    """The stored tokens, and what the ranks do with a step."""

    def __init__(self) -> None:
        self.kept: dict[int, int] = {}

    def run(self, appended: Appended, tokens: list[int]) -> None:
        copied = {
            target * BLOCK + offset: self.kept.get(source * BLOCK + offset, -1)
            for source, target in appended.copies
            for offset in range(BLOCK)
        }
        self.kept |= copied
        self.kept |= dict(zip(appended.slots.tolist(), tokens, strict=True))
        read = appended.tables.flatten().tolist()
        written = [slot // BLOCK for slot in (*copied, *appended.slots.tolist())]
        assert max([*read, *written], default=-1) < appended.blocks

    def rows(self, appended: Appended) -> Iterator[list[int]]:
        for table, length in zip(appended.tables.tolist(), appended.lengths.tolist(), strict=True):
            places = [table[index // BLOCK] * BLOCK + index % BLOCK for index in range(length)]
            assert all(place >= 0 for place in places)
            yield [self.kept[place] for place in places]


def read(cache: PagedCache, slots: Slots) -> list[list[int]]:
    """Return the tokens of each row, located by a step that contains only padding."""
    with copy.deepcopy(cache).append(torch.zeros(cache.batch_size, 1)) as appended:
        return list(slots.rows(appended))
