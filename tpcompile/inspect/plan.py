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
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import operand, parameters, value_type
from tpcompile.ir.ops import (
    ALL_REDUCE,
    ALL_REDUCE_RESIDUAL,
    ATTENTION,
    CACHE_WRITERS,
    EMBEDDINGS,
    EXPERTS,
    NORM_EXPERTS,
    NORM_MLPS,
    NORM_MLPS_APART,
    SPECS,
    SWIGLU,
    arguments_of,
    spec_of,
)
from tpcompile.ir.ops.cache import stored_type
from tpcompile.ir.ops.spec import local_bytes
from tpcompile.ir.plan import EXPERT_AXIS, expert_plans
from tpcompile.ir.roles import StatesOf
from tpcompile.ir.types import REPLICATE, ValueType

_SHARES = ("rank", "q heads", "kv heads", "ffn", "vocab", "weights", "KV per token")
_EXPERTS = "experts"
"""The further column of a model with experts: how many a rank has, and their features."""
_STATE = "state"
"""The further column of a model whose sequences have states."""
_PLANS = ("experts", "bytes", "")
_PLANS_TITLE = "expected bytes of experts per token, on the busiest rank"
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
    experts: int
    """The number of experts of which the rank has weights; 0 without any."""
    expert_ffn: int
    """The features of each of them."""
    expert_bytes: int
    """The bytes of the weights of its experts in all layers."""


@dataclass(frozen=True)
class ExpertPlan:
    """A way to share experts, and the bytes of them that the busiest rank reads for a token.

    They are expected, as if all choices were equally likely. None if the plan is not possible.
    """

    plan: str
    bytes_per_token: int | None
    chosen: bool
    reason: str


@dataclass(frozen=True)
class Collective:
    """A collective, and the bytes that a rank sends around a ring per token or row of logits."""

    op: str
    node: str
    bytes_per_token: int


@dataclass(frozen=True, repr=False)
class PlanReport:
    """A plan as a table and as JSON."""

    model: str
    tp: int
    ranks: tuple[RankShare, ...]
    collectives: tuple[Collective, ...]
    formats: dict[str, int]
    """The bytes of the weights on all ranks, by the name of their format."""
    expert_plans: tuple[ExpertPlan, ...] = ()
    """The plans of a mixture of experts on several ranks."""

    def __repr__(self) -> str:
        """Return one line; `table()` has all of it."""
        most = max(share.weight_bytes for share in self.ranks)
        return (
            f"<plan of {self.model}, tp={self.tp}: at most {_size(most)} of weights on a rank, "
            f"{len(self.collectives)} collectives per step; print(plan.table()) shows it>"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "tp": self.tp,
            "ranks": [asdict(share) for share in self.ranks],
            "collectives": [asdict(collective) for collective in self.collectives],
            "formats": self.formats,
            "expert_plans": [asdict(plan) for plan in self.expert_plans],
        }

    def table(self) -> str:
        """Format tables: the ranks, the plans of experts, the collectives by kind, the formats."""
        from rich.table import Table

        tables: list[Table] = []
        for title, columns, rows in self._tables():
            table = Table(title=title, title_justify="left", min_width=66 if tables else None)
            for column in columns:
                table.add_column(column, justify="right", no_wrap=column in (_EXPERTS, "weights"))
            for row in rows:
                table.add_row(*row)
            tables.append(table)
        return table_text(*tables)

    def _repr_html_(self) -> str:
        """Show the same tables in a notebook."""
        return "".join(table_html(*table) for table in self._tables())

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], Iterator[tuple[str, ...]]]]:
        yield self._title, self._columns, self._shares()
        if self.expert_plans:
            yield _PLANS_TITLE, _PLANS, self._plans()
        if self.collectives:
            yield _CROSSING_TITLE, _CROSSING, self._crossing()
        if len(self.formats) > 1:
            yield _FORMATS_TITLE, _FORMATS, self._stored()

    @property
    def _title(self) -> str:
        return f"{self.model}, tp={self.tp}"

    @property
    def _columns(self) -> tuple[str, ...]:
        has_states = any(share.state_bytes_per_sequence for share in self.ranks)
        has_experts = any(share.experts for share in self.ranks)
        return (*_SHARES, *[_STATE] * has_states, *[_EXPERTS] * has_experts)

    def _shares(self) -> Iterator[tuple[str, ...]]:
        for share in self.ranks:
            cells = {
                "rank": str(share.rank),
                "q heads": str(share.q_heads),
                "kv heads": str(share.kv_heads),
                "ffn": str(share.ffn),
                "vocab": str(share.vocab),
                "weights": _size(share.weight_bytes),
                "KV per token": _size(share.kv_bytes_per_token),
                _STATE: _size(share.state_bytes_per_sequence),
                _EXPERTS: f"{share.experts} × {share.expert_ffn}",
            }
            yield tuple(cells[column] for column in self._columns)

    def _plans(self) -> Iterator[tuple[str, ...]]:
        for plan in self.expert_plans:
            size = "" if plan.bytes_per_token is None else _size(plan.bytes_per_token)
            yield f"{plan.plan}{' (chosen)' * plan.chosen}", size, plan.reason

    def _crossing(self) -> Iterator[tuple[str, ...]]:
        for op in dict.fromkeys(collective.op for collective in self.collectives):
            sizes = [c.bytes_per_token for c in self.collectives if c.op == op]
            yield op, str(len(sizes)), f"{sum(sizes):,}"

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
    mixtures = [arguments_of(node) for node in calls if node.target in (EXPERTS, NORM_EXPERTS)]
    experts = [value_type(operands["down"]) for operands in mixtures]
    held = experts + [value_type(operands["gate_up"]) for operands in mixtures]
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
            experts=_most(experts, 0, rank),
            expert_ffn=_most(experts, 2, rank),
            expert_bytes=sum(local_bytes(kind, rank) for kind in held),
        )
        for rank in range(info.tp)
    )
    collectives = tuple(_collectives(calls, info.tp))
    plans = tuple(_expert_plans(mixtures, info.tp))
    return PlanReport(info.name, info.tp, ranks, collectives, _formats(weights, info.tp), plans)


def _expert_plans(mixtures: list[dict[str, Any]], tp: int) -> Iterator[ExpertPlan]:
    """Yield the plans of the experts of all layers, of which the first has the shapes of each."""
    if tp == 1 or not mixtures:
        return
    gate_up, down = [value_type(mixtures[0][name]) for name in ("gate_up", "down")]
    count, features = down.extent(0), down.extent(2)
    chosen = value_type(mixtures[0]["ids"]).extent(-1)
    whole = sum(local_bytes(kind.placed(REPLICATE), 0) for kind in (gate_up, down))
    layout, grain = down.layout_of(0), down.stored.grain
    current = "ep" if isinstance(layout, Layout) and layout.axis == EXPERT_AXIS else "tp"
    plans = expert_plans(count, features, chosen, tp, grain)
    least = min(cost for _, cost in plans.values())
    impossible = {
        "tp": f"{features} features have too few parts of {grain}",
        "ep": f"{count} experts are fewer than the ranks",
    }
    for name, reason in impossible.items():
        if name not in plans:
            yield ExpertPlan(name, None, False, reason)
            continue
        _, cost = plans[name]
        reason = "fewest bytes" if cost == least else "requested" if name == current else ""
        read = round(len(mixtures) * whole / count * cost)
        yield ExpertPlan(name, read, name == current, reason)


def _formats(weights: Iterable[ValueType], ranks: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for kind in weights:
        name, size = str(kind.stored), sum(local_bytes(kind, rank) for rank in range(ranks))
        sizes[name] = sizes.get(name, 0) + size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


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
    collectives = []
    for node in calls:
        spec = spec_of(node)
        if spec is not None and spec.across is not None:
            source = operand(node)
            cost = spec.cost(value_type(node), [value_type(source)], 0)
            if not cost.wire_bytes:
                continue
            sent = cost.wire_bytes * (ranks - 1) // ranks
            name = SPECS[_CROSSES.get(node.target, node.target)].name.removeprefix("tpc.")
            collectives.append(Collective(name, node.name, sent))
    return collectives


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
