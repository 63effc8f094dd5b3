"""The inputs of graphs: a batch and, with a KV cache, a second step that reads the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from benchmarks.mutations.subjects import Graph
from tpcompile.ir.info import info_of
from tpcompile.ir.layout import even_runs
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import CACHE_OPS, CACHED_ATTENTION, PARTIAL_ATTENTION
from tpcompile.ir.roles import CacheOf, StatesOf
from tpcompile.ir.types import ValueType
from tpcompile.runtime.kv.packing import Packed, pack

_LENGTHS = (9, 1, 6)
_BEFORE = (5, 0, 4)
"""The number of tokens of each sequence in the first of two steps."""
Inputs = dict[str, torch.Tensor]


def steps_of(original: Graph) -> list[Inputs]:
    """Return the inputs of one step, or of two if the graph has a KV cache.

    The graph of a decode step takes the last token of each sequence. The first step then runs on
    the graph that fills its cache.
    """
    batch = tokens(original.subject.captured.config.vocab_size, original.tp)
    block = _block(original.gm)
    if block is None:
        return [batch.inputs()]
    before = [length - 1 for length in _LENGTHS] if decodes(original.gm) else _BEFORE
    counts = [-(-length // block) for length in _LENGTHS]
    # without block 0: it starts at slot 0 for every block size, so a wrong size would not show
    free = list(range(sum(counts), 0, -1))
    tables = torch.full((len(counts), max(counts)), -1)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        tables[row, :count] = tables[row, :count].flip(0)
    rows = batch.input_ids.split(list(_LENGTHS))
    spans = [(0, first) for first in before], list(zip(before, _LENGTHS, strict=True))
    steps = [_step(rows, span, tables, block) for span in spans]
    known = any(isinstance(value_type(node).role, StatesOf) for node in kept_inputs(original.gm))
    return _with_states(steps) if known else steps


def _step(
    rows: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]], tables: torch.Tensor, block: int
) -> Inputs:
    """Return the inputs for tokens `first` to `last` of each sequence."""
    places = [torch.arange(first, last) for first, last in spans]
    counts = torch.tensor([len(place) for place in places])
    slots = [
        table[place // block] * block + place % block
        for table, place in zip(tables, places, strict=True)
    ]
    return {
        "input_ids": torch.cat([row[place] for row, place in zip(rows, places, strict=True)]),
        "positions": torch.cat(places),
        "starts": torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]),
        "logit_rows": torch.arange(int(counts.sum())),
        "slots": torch.cat(slots),
        "tables": tables,
        "lengths": torch.tensor([last for _, last in spans]),
    }


def _with_states(steps: list[Inputs]) -> list[Inputs]:
    """Add the states of linear attention: each step reads those that the one before wrote."""
    count = len(_LENGTHS)
    numbers = [torch.arange(count) + count * place for place in range(len(steps) + 1)]
    return [
        {**step, "read": numbers[place], "write": numbers[place + 1]}
        for place, step in enumerate(steps)
    ]


def caches_for(gm: fx.GraphModule, steps: Sequence[Inputs], original: Graph) -> list[Inputs]:
    """Return each rank's cache and states by the names of inputs, filled with NaN."""
    block = _block(original.gm)
    if block is None:
        return [{} for _ in range(info_of(gm).tp)]
    slots = (int(steps[-1]["tables"].max()) + 1) * block
    counts = {CacheOf: slots, StatesOf: (len(steps) + 1) * len(_LENGTHS)}
    kinds = {node.name: value_type(node) for node in kept_inputs(gm)}
    return [
        {name: _missing(kind, rank, counts[type(kind.role)]) for name, kind in kinds.items()}
        for rank in range(info_of(gm).tp)
    ]


def _missing(kind: ValueType, rank: int, count: int) -> torch.Tensor:
    shape = [count if isinstance(extent, str) else extent for extent in kind.local_shape(rank)]
    return torch.full(shape, torch.nan, dtype=kind.dtype)


def kept_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the inputs of which each rank has its own part: the cache and the states."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [node for node in inputs if value_type(node).role is not None]


def cache_of(gm: fx.GraphModule) -> fx.Node | None:
    return next((n for n in gm.graph.nodes if n.op == "placeholder" and n.name == "cache"), None)


def decodes(gm: fx.GraphModule) -> bool:
    """Return whether the graph takes one new token of each sequence per step."""
    return any(node.target in (CACHED_ATTENTION, PARTIAL_ATTENTION) for node in gm.graph.nodes)


def _block(gm: fx.GraphModule) -> int | None:
    node = cache_of(gm)
    if node is None:
        return None
    assert all(user.target in CACHE_OPS for user in node.users)
    role = value_type(node).role
    assert isinstance(role, CacheOf)
    return role.block


def tokens(vocabulary: int, tp: int) -> Packed:
    """Return three sequences with ids from every rank's part of the vocabulary.

    They include the first and the last row of each part, where a split can be off by one. The
    other ids are spread over the vocabulary.
    """
    edges = [row for ((start, stop),) in even_runs(vocabulary, tp) for row in (start, stop - 1)]
    count = sum(_LENGTHS)
    between = [row * vocabulary // count + 1 for row in range(count - len(edges))]
    spread = torch.tensor(edges + between)[torch.arange(count) * 7 % count]
    ids = torch.zeros(len(_LENGTHS), max(_LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(_LENGTHS):
        mask[row, :length] = 1
        ids[row, :length], spread = spread[:length], spread[length:]
    return pack(ids, mask)
