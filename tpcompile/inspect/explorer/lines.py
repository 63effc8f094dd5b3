"""Lines of a graph in a form that is the same for equal layers, with details of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from tpcompile.inspect.dump import parameter_json
from tpcompile.inspect.explorer.needs import rule_of
from tpcompile.ir.layout import FusedLayout, Layout
from tpcompile.ir.meta import captured_value, origin_of, type_of
from tpcompile.ir.ops import op_name, spec_of
from tpcompile.ir.text.printer import Printer
from tpcompile.ir.types import AnyType, Shard, SymbolType, ValueType
from tpcompile.ir.values.local import LocalExpressions

THIS, BEFORE, AFTER = "\x01", "\x02", "\x03"
"""The number of a line's layer in a template, and those of the layers before and after."""

_NUMBERS = re.compile(r"(?:(?<=%l)|(?<=layer=)|(?<=\.)(?=\d+(?:[.\s]|$)))(\d+)")
"""Numbers that may be those of layers: in names of values, in roles, and in paths of modules."""
_FORMS = {"placeholder": "input", "get_attr": "param", "output": "return"}


class _Known(NamedTuple):
    """The number of a line, and the objects that it was made from."""

    line: int
    operands: tuple[str, ...]
    made_from: tuple[Any, ...]


@dataclass
class Lines:
    """The distinct lines of all stages. A line of a layer stands for those of all equal layers."""

    files: dict[str, str] = field(default_factory=dict)
    """The path of each source file, by the name under which lines cite it."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    _numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    _known: dict[fx.Node, _Known] = field(default_factory=dict)
    _printer: Printer = field(default_factory=lambda: Printer(origins=False))
    _expressions: LocalExpressions = field(default_factory=LocalExpressions)

    def number_of(self, node: fx.Node, ranks: int) -> int:
        """Return the number of a node's line."""
        meta = node.meta
        operands = tuple(other.name for other in node.all_input_nodes)
        now = (node.args, node.kwargs, meta.get("type"), meta.get("parameter"))
        known = self._known.get(node)
        if known is None or known.operands != operands or not _same(now, known.made_from):
            known = self._known[node] = _Known(self._numbered(node, ranks), operands, now)
        return known.line

    def _numbered(self, node: fx.Node, ranks: int) -> int:
        origin = origin_of(node)
        general = generalised(origin.layer)
        text = general(self._printer.node(node))
        comment = general(str(origin)) if node.op not in ("placeholder", "output") else ""
        key = (f"{text}  # {comment}", ranks)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.rows)
            self.rows.append(self._details(node, text, general, ranks))
        return number

    def _details(
        self, node: fx.Node, text: str, general: Callable[[str], str], ranks: int
    ) -> dict[str, Any]:
        """Describe a value for the page. Absent entries have no meaning for this kind of value."""
        kind, origin = type_of(node) if "type" in node.meta else None, origin_of(node)
        row: dict[str, Any] = {
            "text": text,
            "name": general_name(node.name, origin.layer),
            "op": _op(node),
            "operands": [general(f"%{other.name}")[1:] for other in node.all_input_nodes],
            "place": _placed(kind),
        }
        if node.op not in ("placeholder", "output") and origin.file:
            file = origin.file.rpartition("/")[2]
            self.files.setdefault(file, origin.file)
            row["origin"] = [general(origin.module), file, origin.line]
        elif origin.module and node.op != "output":
            row["origin"] = [general(origin.module), "", 0]
        if node.op == "get_attr":
            row["parameter"] = _general_parameter(parameter_json(node, list(range(ranks))), general)
        row["expressions"] = [general(text) for text in self._expressions.of(node)]
        if node.op.startswith("call"):
            row |= {"rule": rule_of(node), **_costs(node, ranks)}
            row["value"] = general(f"%{captured_value(node) or ''}")[1:]
        return row


def generalised(layer: int | None, after: bool = False) -> Callable[[str], str]:
    """Return a function that replaces the numbers of a layer and of the one before.

    With `after`, it also replaces that of the next layer, which readers of a value may have.
    """
    if layer is None:
        return lambda text: text
    marks = {str(layer): THIS, str(layer - 1): BEFORE}
    if after:
        marks[str(layer + 1)] = AFTER
    return lambda text: _NUMBERS.sub(lambda match: marks.get(match[1], match[1]), text)


def general_name(name: str, layer: int | None) -> str:
    """Return the name of a value in the templates of a layer."""
    return generalised(layer)(f"%{name}")[1:]


def _same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(now, before, strict=True))


def _op(node: fx.Node) -> str:
    return _FORMS.get(node.op) or op_name(node)


def _placed(kind: AnyType | None) -> dict[str, Any]:
    """Return the placement of a value: its kind and text, and the axis and dimension of a shard."""
    if isinstance(kind, SymbolType) or kind is None:
        return {"kind": "none", "text": ""}
    if isinstance(kind, tuple):
        return {"kind": "several", "text": "several"}
    placement = kind.placement
    entry: dict[str, Any] = {"kind": type(placement).__name__, "text": str(placement)}
    if not isinstance(placement, Shard):
        return entry
    layout = placement.layout
    entry |= {"dim": placement.dim, "axis": str(layout)}
    if isinstance(layout, Layout | FusedLayout):
        entry["parts"] = [layout.intervals(rank) for rank in range(layout.ranks)]
    return entry


def _by_rank(values: list[Any]) -> list[Any]:
    """Return the values of all ranks, or one value if they are equal."""
    return values[:1] if all(value == values[0] for value in values) else values


def _general_parameter(parameter: dict[str, Any], general: Callable[[str], str]) -> dict[str, Any]:
    """Return the recipes of a parameter, and the bytes of checkpoint tensors that ranks read."""
    ranks = [
        {
            "recipe": general(rank["recipe"]),
            "reads": [{**read, "tensor": general(read["tensor"])} for read in rank["reads"]],
        }
        for rank in parameter["ranks"]
    ]
    return {"recipe": general(parameter["recipe"]), "ranks": _by_rank(ranks)}


def _costs(node: fx.Node, ranks: int) -> dict[str, Any]:
    """Return the operations, the bytes of memory and the bytes sent of each rank, per token.

    In a ring, a rank sends all parts of a value but one.
    """
    spec, result_type = spec_of(node), node.meta.get("type")
    operands = [kind for kind in map(type_of, node.all_input_nodes) if isinstance(kind, ValueType)]
    whole = len(operands) == len(node.all_input_nodes) and isinstance(result_type, ValueType)
    if spec is None or not whole:
        return {}
    costs = [spec.cost(result_type, operands, rank) for rank in range(ranks)]
    sent = [cost.wire_bytes * (ranks - 1) // ranks for cost in costs]
    rows = [[c.flops, c.memory_bytes, wire] for c, wire in zip(costs, sent, strict=True)]
    return {"cost": _by_rank(rows)}
