"""The regions that instructions access, as columns: each box is stored once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, count
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from tpcompile.inspect.explorer.columns import small
from tpcompile.vm.program import Box, Buffer, Program


def access_columns(program: Program) -> dict[str, np.ndarray]:
    """Return the accesses of each instruction: its reads, then its writes, then its joins.

    An access is a buffer and the number of a box. Box b has `box_dims[b]` intervals, and their
    starts and stops are in `box_edges`.
    """
    reads = list(map(attrgetter("reads"), program.instructions))
    writes = list(map(attrgetter("writes"), program.instructions))
    every = map(attrgetter("joins"), program.instructions)
    joins = [joined and tuple(join.region for join in joined) for joined in every]
    accesses = zip(reads, writes, joins, strict=True)
    regions = list(chain.from_iterable(chain.from_iterable(accesses)))
    boxes: defaultdict[Box, int] = defaultdict(count().__next__)
    numbers = small(map(boxes.__getitem__, map(itemgetter(1), regions)))
    return {
        "reads": small(map(len, reads)),
        "writes": small(map(len, writes)),
        "joins": small(map(len, joins)),
        "access_buffer": small(map(itemgetter(0), regions)),
        "access_box": numbers,
        "box_dims": small(map(len, boxes)),
        "box_edges": small(chain.from_iterable(chain.from_iterable(boxes))),
    }


def buffer_data(buffers: Sequence[Buffer]) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Return the distinct descriptions of buffers, and the description and rank of each buffer.

    Buffers of different ranks usually have the same description.
    """
    numbers: dict[tuple[str, str, str, tuple[int, ...]], int] = {}
    descriptions = [
        (buffer.name, buffer.role.word, str(buffer.dtype)[6:], buffer.shape) for buffer in buffers
    ]
    column = small([numbers.setdefault(description, len(numbers)) for description in descriptions])
    names = ("name", "role", "dtype", "shape")
    distinct = [dict(zip(names, description, strict=True)) for description in numbers]
    return distinct, {
        "buffer_like": column,
        "buffer_rank": small(buffer.rank for buffer in buffers),
    }
