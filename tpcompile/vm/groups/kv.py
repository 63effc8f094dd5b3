"""The KV cache of a program, and the slots of its sequences."""

from __future__ import annotations

from typing import Any

from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.vm.lowering.building import Building
from tpcompile.vm.program import Role
from tpcompile.vm.program.instruction import Range
from tpcompile.vm.program.meaning import Part, Values


def cache_of(builder: Building, node: fx.Node, block: int) -> int:
    """Declare the cache. Regions index sequences and past or new tokens; memory indexes slots."""
    kind = value_type(node)
    builder.plan.check_room(block)
    slots = builder.plan.batch * builder.plan.most_blocks(block) * block
    regions, storages = [], []
    for rank in range(builder.ranks):
        layers, heads, width = (kind.local_extent(rank, dim) for dim in (0, 3, 4))
        regions.append((layers, 2, builder.plan.batch, heads, 2))
        storages.append((layers, 2, slots, heads, width))
    dtype = kind.stored.values.dtype.torch
    return builder.declare(Role.CACHE.word, regions, dtype, Role.CACHE, storages, kind.format)


def together(rows: Range, sequence_rows: int) -> Range:
    """Return the rows that may belong to one sequence with some rows."""
    first, last = rows.start // sequence_rows, -(-rows.stop // sequence_rows)
    return Range(first * sequence_rows, last * sequence_rows)


NEW = 1
"""The index of the new token of a sequence in the last dimension of the cache's regions."""


def side(layer: int, part: int) -> tuple[Part, ...]:
    """Return the part of the cache that the new keys (0) or values (1) of a layer take."""
    return layer, part, None, None, NEW


def stored_tokens(values: Values, layer: int) -> Any:
    """Return the contents of a layer of the cache, with the new keys and values."""
    new = (values.part("cache", *side(layer, part)) for part in range(2))
    return values.call("cached tokens", layer, *new)


def stored(values: Values, new: Any, block: int) -> Any:
    """Return new keys or values, stored at the last places of their sequences."""
    slots = values.call("slots", values["lengths"], values["tables"], block)
    return values.call("stored", new, slots)


def places(builder: Building, block: int, rank: int) -> dict[str, int]:
    """Return the operands that locate the sequences in the cache."""
    batch, most = builder.plan.batch, builder.plan.most_blocks(block)
    return {
        "lengths": builder.sole(Role.LENGTHS, (batch,)) + rank,
        "tables": builder.sole(Role.TABLES, (batch, most)) + rank,
        "most_blocks": most,
        "block": block,
    }
