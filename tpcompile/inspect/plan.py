"""The plan of a sharded graph: the share of each rank, and the collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from tpcompile.inspect.notebook import table_html
from tpcompile.inspect.tables import table_text
from tpcompile.ir.activations import activations
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import operand, parameters, value_type
from tpcompile.ir.ops import (
    ALL_REDUCE,
    ALL_REDUCE_RESIDUAL,
    ATTENTION,
    CACHE_WRITERS,
    EMBEDDINGS,
    NORM_MLPS,
    NORM_MLPS_APART,
    SPECS,
    SWIGLU,
    arguments_of,
    spec_of,
)
from tpcompile.ir.ops.cache import stored_type
from tpcompile.ir.ops.spec import local_bytes
from tpcompile.ir.roles import StatesOf
from tpcompile.ir.types import ValueType

_SHARES = ("rank", "q heads", "kv heads", "ffn", "vocab", "weights", "KV per token")
_STATE = "state"
"""The further column of a model whose sequences have states."""
_CROSSING = ("collective", "times", "bytes")
_FORMATS = ("format", "weights")
_FORMATS_TITLE = "bytes of the weights on all ranks, by format"
_CROSSING_TITLE = "bytes that a rank sends around a ring, per token or row of logits"


@dataclass(frozen=True)
class RankShare:
    """The share of one rank, with the heads and widths of its widest layer."""

    rank: int
    q_heads: int
    kv_heads: int
    ffn: int
    vocab: int
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    """The bytes of a sequence's state of linear attention in all layers; 0 without any."""


@dataclass(frozen=True)
class Collective:
    """A collective, and the bytes that a rank sends around a ring per token or row of logits."""

    op: str
    node: str
    bytes_per_token: int


@dataclass(frozen=True)
class PlanReport:
    """A plan as a table and as JSON."""

    model: str
    tp: int
    ranks: tuple[RankShare, ...]
    collectives: tuple[Collective, ...]
    formats: dict[str, int]
    """The bytes of the weights on all ranks, by the name of their format."""

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "tp": self.tp,
            "ranks": [asdict(share) for share in self.ranks],
            "collectives": [asdict(collective) for collective in self.collectives],
            "formats": self.formats,
        }

    def table(self) -> str:
        """Format tables: the ranks, the collectives by kind, and several formats."""
        from rich.table import Table

        shares = Table(title=self._title, title_justify="left")
        for column in self._columns:
            shares.add_column(column, justify="right")
        for row in self._shares():
            shares.add_row(*row)
        crossing = Table(title=_CROSSING_TITLE, title_justify="left", min_width=66)
        for column in _CROSSING:
            crossing.add_column(column, justify="right")
        for row in self._crossing():
            crossing.add_row(*row)
        stored = Table(title=_FORMATS_TITLE, title_justify="left", min_width=66)
        for column in _FORMATS:
            stored.add_column(column, justify="right")
        for row in self._stored():
            stored.add_row(*row)
        further = [crossing] if self.collectives else []
        further += [stored] if len(self.formats) > 1 else []
        return table_text(shares, *further)

    def _repr_html_(self) -> str:
        """Show the same tables in a notebook."""
        shares = table_html(self._title, self._columns, self._shares())
        crossing = table_html(_CROSSING_TITLE, _CROSSING, self._crossing())
        stored = table_html(_FORMATS_TITLE, _FORMATS, self._stored())
        shares += crossing if self.collectives else ""
        return shares + (stored if len(self.formats) > 1 else "")

    @property
    def _title(self) -> str:
        return f"{self.model}, tp={self.tp}"

    @property
    def _columns(self) -> tuple[str, ...]:
        has_states = any(share.state_bytes_per_sequence for share in self.ranks)
        return (*_SHARES, _STATE) if has_states else _SHARES

    def _shares(self) -> Iterator[tuple[str, ...]]:
        columns = len(self._columns)
        for share in self.ranks:
            counts = (share.rank, share.q_heads, share.kv_heads, share.ffn, share.vocab)
            sizes = (share.weight_bytes, share.kv_bytes_per_token, share.state_bytes_per_sequence)
            yield (*map(str, counts), *map(_size, sizes))[:columns]

    def _crossing(self) -> Iterator[tuple[str, ...]]:
        for op in dict.fromkeys(collective.op for collective in self.collectives):
            found = [c.bytes_per_token for c in self.collectives if c.op == op]
            yield op, str(len(found)), f"{sum(found):,}"

    def _stored(self) -> Iterator[tuple[str, ...]]:
        for name, size in self.formats.items():
            yield name, _size(size)


def plan_report(gm: fx.GraphModule) -> PlanReport:
    """Derive the plan from the types of a graph after the pipeline."""
    info = info_of(gm)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    heads = [kinds for kinds in map(_heads, calls) if kinds is not None]
    mlps = (SWIGLU, *NORM_MLPS.values(), *NORM_MLPS_APART.values())
    activated = [value_type(node) for node in calls if node.target in mlps]
    activated += [value_type(other.result) for other in activations(gm.graph)]
    tables = [value_type(operand(node)) for node in calls if node.target in EMBEDDINGS]
    weights = [value_type(node) for node in parameters(gm.graph)]
    inputs = [value_type(node) for node in gm.graph.nodes if node.op == "placeholder"]
    states = [kind for kind in inputs if kind.role == StatesOf()]
    queries, keys = [[kinds[side] for kinds in heads] for side in (0, 1)]
    ranks = tuple(
        RankShare(
            rank=rank,
            q_heads=_most(queries, -2, rank),
            kv_heads=_most(keys, -2, rank),
            ffn=_most(activated, -1, rank),
            vocab=_most(tables, 0, rank),
            weight_bytes=sum(local_bytes(kind, rank) for kind in weights),
            kv_bytes_per_token=2 * sum(local_bytes(kind, rank) for kind in keys),
            state_bytes_per_sequence=sum(local_bytes(kind, rank) for kind in states),
        )
        for rank in range(info.tp)
    )
    collectives = tuple(_collectives(calls, info.tp))
    return PlanReport(info.name, info.tp, ranks, collectives, _formats(weights, info.tp))


def _formats(weights: Iterable[ValueType], ranks: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind in weights:
        name, size = str(kind.stored), sum(local_bytes(kind, rank) for rank in range(ranks))
        found[name] = found.get(name, 0) + size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _heads(node: fx.Node) -> tuple[ValueType, ValueType] | None:
    """Return the types of the queries and keys of an attention op, or None for another op."""
    if node.target == ATTENTION:
        return value_type(operand(node)), value_type(operand(node, 1))
    if node.target in CACHE_WRITERS:
        queries = value_type(node)
        return queries, stored_type(value_type(arguments_of(node)["cache"]), queries.shape[0])
    return None


def _most(kinds: list[ValueType], dim: int, rank: int) -> int:
    extents = [kind.local_shape(rank)[dim] for kind in kinds]
    return max((extent for extent in extents if isinstance(extent, int)), default=0)


_CROSSES = {ALL_REDUCE_RESIDUAL: ALL_REDUCE}
"""The collectives inside fused ops, by op."""


def _collectives(calls: list[fx.Node], ranks: int) -> list[Collective]:
    found = []
    for node in calls:
        spec = spec_of(node)
        if spec is not None and spec.across is not None:
            source = operand(node)
            cost = spec.cost(value_type(node), [value_type(source)], 0)
            if not cost.wire_bytes:
                continue
            sent = cost.wire_bytes * (ranks - 1) // ranks
            name = SPECS[_CROSSES.get(node.target, node.target)].name.removeprefix("tpc.")
            found.append(Collective(name, node.name, sent))
    return found


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
