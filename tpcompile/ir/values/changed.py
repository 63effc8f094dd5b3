"""The values of a graph whose expressions differ from the values that they stand for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from tpcompile.ir.values.expressions import GraphValues
from tpcompile.ir.values.value import Value


def earlier_values(old: GraphValues, new: GraphValues) -> dict[fx.Node, Value]:
    """Return the value of an earlier graph that each node of a later one stands for.

    If a node's captured value has changed, the new one counts.
    """
    known: dict[str, Value] = {}
    for node, captured in old.names.items():
        if isinstance(old.nodes[node], Value):
            known.setdefault(captured, old.nodes[node])
    earlier: dict[fx.Node, Value] = {}
    for node in new.nodes:
        name = new.names.get(node)
        is_kept = node in old.nodes and old.names.get(node) == name
        value = old.nodes[node] if is_kept else known.get(name or "")
        if isinstance(value, Value) and node.op != "placeholder":
            earlier[node] = value
    return earlier


def changed_values(old: GraphValues, new: GraphValues) -> Iterator[tuple[fx.Node, Value, Value]]:
    """Yield each node whose expression is not that of the value that it stands for, in order.

    Both values are yielded, too.
    """
    for node, before in earlier_values(old, new).items():
        value = new.nodes[node]
        if isinstance(value, Value) and before.body is not value.body:
            yield node, before, value
