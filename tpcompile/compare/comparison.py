"""The comparison of a sharded graph with the captured one, value by value, in graph order.

Values are not matched by a list of names: the passes record which captured value each node
computes, and a sharded value is assembled according to its type.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from tpcompile.compare.choices import ChangedChoice, Choices, choices_text
from tpcompile.compare.proofs import Proofs
from tpcompile.compare.rows import Row, row_of, token_margin
from tpcompile.inspect.tables import table_text
from tpcompile.ir.meta import captured_value, operand, origin_of, type_of
from tpcompile.ir.ops import TOP_EXPERTS
from tpcompile.ir.ops.collectives import to_whole
from tpcompile.ir.simulate import Values, logits_of
from tpcompile.ir.types import REPLICATE, ValueType

_ALONE = {"max abs": "max_abs", "relative": "rel"}
_BESIDE_FP32 = {
    "relative": "rel",
    "to fp32": "error",
    "eager": "eager_error",
    "limit": "limit",
}
"""The numbers of a row in a table, by column."""
_EXACT = "fp32: eager in fp32, with the same weights"
_FEW_BITS = ", those of few bits as the exact products of integers and scales; eager rounds these"


@dataclass(frozen=True)
class Comparison:
    """All rows, and the next tokens of the models."""

    rows: tuple[Row, ...]
    tokens_equal: bool
    top5: dict[str, list[int]]
    shown: tuple[str, ...] = ()
    """The names of rows that the table shows even if they are not the worst."""
    few_bits: bool = False
    """Whether weights are in 8 or 4 bits."""
    choices: tuple[Choices, ...] = ()
    """The choices of routers; the values of `rows` are those with eager's choices."""
    proofs: Proofs = field(default_factory=Proofs)
    """The proofs, which need no measurement."""

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
            "proof": self.proofs.to_json(),
            "rows": [_plain(row) for row in self.rows],
            "first_divergence": _plain(first) if first else None,
            "tokens_equal": self.tokens_equal,
            "top5": self.top5,
            "choices": self._choices_json() if self.choices else None,
        }

    def _choices_json(self) -> dict[str, Any]:
        changed = [choice for choices in self.choices for choice in choices.changed]
        return {
            "compared": sum(len(choices.place.tokens) for choices in self.choices),
            "changed": [_plain(choice) | {"ok": choice.ok} for choice in changed],
        }

    def table(self, everything: bool = False) -> str:
        """Format the worst value of each layer, or every value, and the verdict.

        Proofs come first, and then changed choices of experts.
        """
        from rich.table import Table

        beside_fp32 = any(row.beside_fp32 for row in self.rows)
        numbers = _BESIDE_FP32 if beside_fp32 else _ALONE
        table = Table()
        for column in ("value", "source", *numbers, ""):
            table.add_column(column, justify="left" if column in ("value", "source") else "right")
        for row in self.rows if everything else self._summary():
            verdict = "ok" if row.ok else row.problem or "DIFFERS"
            errors = [f"{getattr(row, field):.1e}" for field in numbers.values()]
            table.add_row(row.node, row.source, *errors, verdict)
        choices = choices_text(self.choices) if self.choices else ""
        return self.proofs.text() + choices + table_text(table) + self._verdict(everything)

    def _summary(self) -> Iterator[Row]:
        """Select the worst row of each layer and those of `shown`, up to the first divergence."""
        first = self.first_divergence
        until = self.rows.index(first) + 1 if first else len(self.rows)
        worst: dict[int | None, Row] = {}
        for row in self.rows[:until]:
            if row.node in self.shown:
                continue
            known = worst.get(row.layer)
            if known is None or row.severity > known.severity or row is first:
                worst[row.layer] = row
        selected = {id(row) for row in (*worst.values(), self.rows[until - 1])}
        return (row for row in self.rows[:until] if id(row) in selected or row.node in self.shown)

    def _verdict(self, everything: bool) -> str:
        first = self.first_divergence
        scope = "" if everything else ", the worst of each layer shown"
        sentences = [f"{len(self.rows)} values compared{scope}"]
        if any(row.beside_fp32 for row in self.rows):
            sentences.append(_EXACT + _FEW_BITS * self.few_bits)
        if first:
            layer = "outside the layers" if first.layer is None else f"in layer {first.layer}"
            why = f": {first.problem}" if first.problem else f", off by {first.error:.1e}"
            if first.beside_fp32 and not first.problem:
                why += f" from fp32, of which rounding explains {first.limit:.1e}"
            where = f" ({first.place})" if first.place else ""
            sentences.append(
                f"FIRST DIVERGENCE at %{first.node} ({first.source}) {layer}{why}{where}"
            )
        same = "the same" if self.tokens_equal else "NOT the same"
        tops = "; ".join(f"{name} {ids}" for name, ids in self.top5.items())
        sentences.append(f"next tokens are {same}; top five of the last row: {tops}")
        return "\n".join(sentences) + "\n"


def compare(
    captured: Values,
    gm: fx.GraphModule,
    values: Values,
    tolerance: float | None = None,
    exact: Values | None = None,
    choices: Mapping[int, Choices] = MappingProxyType({}),
) -> Comparison:
    """Compare the values of a graph on its ranks with those of the captured graph.

    `exact` are the values of the captured graph in fp32, with the same weights. They are used to
    tell rounding from errors if no tolerance is given. `choices` are those of the graph's routers,
    by layer, if all values are those with eager's choices.
    """
    expected, truth = _by_name(captured), _by_name(exact or {})
    rows = tuple(_rows(gm.graph, values, expected, truth, tolerance, choices))
    eager, compiled = logits_of(captured)[0], logits_of(values)[0]
    top5 = {
        name: logits[-1].topk(min(5, logits.shape[-1])).indices.tolist()
        for name, logits in (("eager", eager), ("compiled", compiled))
    }
    margin = token_margin(eager, logits_of(exact)[0] if exact else None, tolerance)
    chosen = compiled.argmax(-1, keepdim=True)
    return Comparison(rows, same_tokens(eager, chosen, margin), top5)


def same_tokens(eager: torch.Tensor, chosen: torch.Tensor, margin: float) -> bool:
    """Return whether eager rates each chosen token within `margin` of its best one."""
    behind = (eager.amax(-1, keepdim=True) - eager.gather(-1, chosen)).double()
    return bool((behind <= margin * eager.abs().max().double()).all())


def _by_name(values: Values) -> dict[str, torch.Tensor]:
    return {node.name: per_rank[0] for node, per_rank in values.items()}


def _rows(
    graph: fx.Graph,
    values: Values,
    expected: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    tolerance: float | None,
    choices: Mapping[int, Choices],
) -> Iterator[Row]:
    for node in graph.nodes:
        name = captured_value(node) if node.op.startswith("call") else None
        kind = type_of(node) if name else None
        if not name or not isinstance(kind, ValueType):
            continue
        actual, wanted = to_whole(values[node], kind), expected[name]
        truth = exact[name] if exact and kind.dtype.is_floating_point else None
        if wanted.dim() == actual.dim() + 1:  # canonicalize drops the batch of one
            wanted, truth = wanted.squeeze(0), None if truth is None else truth.squeeze(0)
        origin = origin_of(node)
        replicas = values[node] if kind.placement == REPLICATE else None
        row = row_of(
            node.name, str(origin), actual, wanted, tolerance, origin.layer, replicas, truth
        )
        chosen = choices.get(-1 if origin.layer is None else origin.layer)
        yield row if chosen is None else _routed_row(node, row, chosen, tolerance)


def _routed_row(node: fx.Node, row: Row, choices: Choices, tolerance: float | None) -> Row:
    """Return the row of a value, judged by the choices if it is a result of a router."""
    if node.target is not operator.getitem or operand(node).target is not TOP_EXPERTS:
        return row
    is_ids = node.args[1] == 1
    return choices.row(row.node, row.source) if is_ids else choices.score_row(row, tolerance)


def _plain(row: Row | ChangedChoice) -> dict[str, Any]:
    """Return a row for JSON, which has neither NaN nor infinity: such an error becomes null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(row).items()
    }
