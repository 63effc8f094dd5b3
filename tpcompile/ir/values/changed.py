"""The values of a graph that have other expressions than the values that they stand for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from tpcompile.ir.meta import captured_value
from tpcompile.ir.values.expressions import GraphValues
from tpcompile.ir.values.value import Value


def changed_values(
    gm: fx.GraphModule, old: GraphValues, new: GraphValues
) -> Iterator[tuple[fx.Node, Value, Value]]:
    """Yield each node whose expression is not that of the node that it stands for, in order.

    Both values are yielded, too.
    """
    known: dict[str, Value] = {}
    for earlier, name in old.names.items():
        if isinstance(old.nodes[earlier], Value):
            known.setdefault(name, old.nodes[earlier])
    for node in gm.graph.nodes:
        value = new.nodes.get(node)
        before = old.nodes.get(node) or known.get(captured_value(node) or "")
        if not isinstance(value, Value) or not isinstance(before, Value):
            continue
        if node.op != "placeholder" and before.body is not value.body:
            yield node, before, value
