"""Several KV caches in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.functional import pad

from tpcompile.runtime.kv.cache import Appended, PagedCache


@contextmanager
def append_all(caches: Sequence[PagedCache], new: Sequence[int]) -> Iterator[Appended]:
    """Make room for new tokens in each cache of one sequence, as `append` does for one.

    If the step raises, all caches are restored.
    """
    with ExitStack() as stack:
        parts = [
            stack.enter_context(cache.append(torch.ones(1, count, dtype=torch.bool)))
            for cache, count in zip(caches, new, strict=True)
        ]
        longest = max(part.tables.shape[1] for part in parts)
        tables = [pad(part.tables, (0, longest - part.tables.shape[1]), value=-1) for part in parts]
        yield Appended(
            slots=torch.cat([part.slots for part in parts]),
            tables=torch.cat(tables),
            lengths=torch.cat([part.lengths for part in parts]),
            copies=tuple(copy for part in parts for copy in part.copies),
            blocks=parts[-1].blocks,  # the pool only grows
            read=torch.cat([part.read for part in parts]),
            write=torch.cat([part.write for part in parts]),
            states=parts[-1].states,
        )
