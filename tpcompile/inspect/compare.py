"""Comparing a sharded graph with the captured one, value by value, in the order of the graph.

Which values belong together is no list of names: passes keep track of which captured value a
node computes, and a sharded value is put together by its own type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from tpcompile.inspect.tables import table_text
from tpcompile.ir.meta import captured_value, origin_of, type_of
from tpcompile.ir.ops.collectives import to_whole
from tpcompile.ir.simulate import Values, logits_of
from tpcompile.ir.types import REPLICATE, ValueType

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.25e-3}
"""Largest error over the largest magnitude. fp32: the same sums in another order, in a model of
any depth; the others: two or three roundings of the dtype (2^-8, 2^-11) in a layer, and in
another order from layer to layer, so that the error walks with the root of the depth."""


@dataclass(frozen=True)
class Row:
    """One value: how far it is from the captured one."""

    node: str
    source: str
    layer: int | None
    max_abs: float
    rel: float
    ok: bool
    problem: str
    """Empty, or what is wrong beside the error: NaN, infinity, ranks that differ, a shape."""


@dataclass(frozen=True)
class Comparison:
    """All rows, and what the two models would say next."""

    rows: tuple[Row, ...]
    tokens_equal: bool
    top5: dict[str, list[int]]
    shown: tuple[str, ...] = ()
    """Rows that the table shows whether or not they are the worst: those of whole models."""

    @property
    def first_divergence(self) -> Row | None:
        return next((row for row in self.rows if not row.ok), None)

    @property
    def ok(self) -> bool:
        return self.first_divergence is None and self.tokens_equal

    def to_json(self) -> dict[str, Any]:
        first = self.first_divergence
        return {
            "ok": self.ok,
            "rows": [asdict(row) for row in self.rows],
            "first_divergence": asdict(first) if first else None,
            "tokens_equal": self.tokens_equal,
            "top5": self.top5,
        }

    def table(self, everything: bool = False) -> str:
        """The worst value of each layer, or every value; then the verdict."""
        from rich.table import Table

        table = Table()
        for column in ("value", "of", "max abs", "relative", ""):
            table.add_column(column, justify="left" if column in ("value", "of") else "right")
        for row in self.rows if everything else self._summary():
            verdict = "ok" if row.ok else row.problem or "DIFFERS"
            table.add_row(row.node, row.source, f"{row.max_abs:.1e}", f"{row.rel:.1e}", verdict)
        return table_text(table) + self._verdict(everything)

    def _summary(self) -> Iterator[Row]:
        """Up to the first divergence, if any: the worst value of each layer, and `shown`."""
        first = self.first_divergence
        until = self.rows.index(first) + 1 if first else len(self.rows)
        worst: dict[int | None, Row] = {}
        for row in self.rows[:until]:
            if row.node in self.shown:
                continue
            known = worst.get(row.layer)
            if known is None or row.rel > known.rel or row is first:
                worst[row.layer] = row
        kept = {id(row) for row in (*worst.values(), self.rows[until - 1])}
        return (row for row in self.rows[:until] if id(row) in kept or row.node in self.shown)

    def _verdict(self, everything: bool) -> str:
        first = self.first_divergence
        which = "" if everything else ", the worst of each layer shown"
        said = [f"{len(self.rows)} values compared{which}"]
        if first:
            layer = "outside of the layers" if first.layer is None else f"in layer {first.layer}"
            why = f": {first.problem}" if first.problem else f", off by {first.rel:.1e}"
            said.append(f"FIRST DIVERGENCE at %{first.node} ({first.source}) {layer}{why}")
        same = "the same" if self.tokens_equal else "NOT the same"
        tops = "; ".join(f"{name} {ids}" for name, ids in self.top5.items())
        said.append(f"next tokens are {same}; the five likeliest of the last row: {tops}")
        return "\n".join(said) + "\n"


def compare(
    captured: Values, gm: fx.GraphModule, values: Values, tolerance: float | None = None
) -> Comparison:
    """The values of a graph on its ranks against those of the captured graph."""
    expected = {node.name: found[0] for node, found in captured.items()}
    rows = tuple(_rows(gm.graph, values, expected, tolerance))
    eager, compiled = logits_of(captured)[0], logits_of(values)[0]
    top5 = {
        name: logits[-1].topk(min(5, logits.shape[-1])).indices.tolist()
        for name, logits in (("eager", eager), ("compiled", compiled))
    }
    depth = 1 + max((row.layer for row in rows if row.layer is not None), default=-1)
    limit = _limit(eager.dtype, tolerance, depth)
    return Comparison(rows, _same_tokens(eager, compiled, limit), top5)


def _same_tokens(eager: torch.Tensor, compiled: torch.Tensor, limit: float) -> bool:
    """Each row's best token is eager's, or one that eager cannot tell from its best either."""
    best, chosen = eager.argmax(-1, keepdim=True), compiled.argmax(-1, keepdim=True)
    margin = (eager.gather(-1, best) - eager.gather(-1, chosen)).double()
    return bool((margin <= limit * eager.abs().max().double()).all())


def _limit(dtype: torch.dtype, tolerance: float | None, depth: int) -> float:
    if tolerance is not None:
        return tolerance
    limit = TOLERANCES.get(dtype, 0.0)
    return limit if dtype == torch.float32 else limit * math.sqrt(1 + depth)


def row_of(
    name: str,
    source: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float | None = None,
    layer: int | None = None,
    ranks: list[torch.Tensor] | None = None,
    depth: int = 0,
) -> Row:
    """One value beside what it should be; `ranks` are replicas, which must have the same bits.

    `depth` is the number of layers that it went through.
    """
    problem = _problem(found, expected, ranks or [])
    max_abs = rel = float("inf")
    if found.shape == expected.shape and found.numel():
        max_abs = float((found.double() - expected.double()).abs().max())
        rel = max_abs / (float(expected.abs().max()) or 1.0)
    elif found.shape == expected.shape:
        max_abs = rel = 0.0
    limit = _limit(expected.dtype, tolerance, depth)
    return Row(name, source, layer, max_abs, rel, not problem and rel <= limit, problem)


def _rows(
    graph: fx.Graph,
    values: Values,
    expected: Mapping[str, torch.Tensor],
    tolerance: float | None,
) -> Iterator[Row]:
    depth = 0
    for node in graph.nodes:
        layer = origin_of(node).layer
        depth = depth if layer is None else layer + 1
        name = captured_value(node) if node.op.startswith("call") else None
        kind = type_of(node) if name else None
        if not name or not isinstance(kind, ValueType):
            continue
        found, wanted = to_whole(values[node], kind), expected[name]
        if wanted.dim() == found.dim() + 1:
            wanted = wanted.squeeze(0)  # the batch of one that canonicalize drops
        origin = origin_of(node)
        replicas = values[node] if kind.placement == REPLICATE else None
        yield row_of(
            node.name, str(origin), found, wanted, tolerance, origin.layer, replicas, depth
        )


def _problem(found: torch.Tensor, expected: torch.Tensor, ranks: list[torch.Tensor]) -> str:
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    if bool(found.isnan().any()):
        return "NaN"
    if bool(found.isinf().any()):
        return "infinity"
    return "" if all(torch.equal(ranks[0], other) for other in ranks[1:]) else "ranks differ"
