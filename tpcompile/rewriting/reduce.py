"""Reduction of a graph on which something fails, while it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import fx

from tpcompile.errors import UsageError
from tpcompile.ir.checker import check_graph
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import made_of, parameters, type_of
from tpcompile.ir.ops import ROTARY
from tpcompile.ir.plan import Plan
from tpcompile.ir.types import REPLICATE, ValueType
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import drop_dead, drop_unused_parameters

ErrorOf = Callable[[fx.GraphModule], str]
"""A function that returns the error of a graph, without names and numbers, or ""."""
Edit = Callable[[fx.GraphModule], None]


@dataclass
class Reducer:
    """A search for a smaller graph with the same error. Every graph that it tries is valid."""

    error_of: ErrorOf
    inputs: bool = True
    """Whether values may become inputs of the graph."""
    follow: Callable[[int, int], None] = lambda nodes, tries: None
    """Callback with the number of nodes of the smallest graph, and of graphs tried."""
    tries: int = field(default=0, init=False)
    error: str = field(default="", init=False)
    """The error that every smaller graph has."""

    def reduce(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return the smallest graph found. Raise UsageError if there is no error."""
        self.error = self.error_of(clone(gm))
        if not self.error:
            raise UsageError(
                "There is no error to reduce",
                hint="Give the pipeline that fails with -p, or a --command that fails",
            )
        best = gm
        while True:
            smaller = self._round(best)
            if smaller is best:
                return best
            best = smaller

    def _round(self, best: fx.GraphModule) -> fx.GraphModule:
        """Try to leave out each value once, from the last to the first."""
        best = self._without_results(best)
        names = [node.name for node in best.graph.nodes if node.op.startswith("call")]
        for name in reversed(names):
            node = _find(best, name)
            if node is not None:
                best = self._shortened(best, node)
            node = _find(best, name)
            if node is not None and self.inputs and _may_be_input(node):
                best = self._tried(best, _as_input(name)) or best
        return best

    def _without_results(self, best: fx.GraphModule) -> fx.GraphModule:
        """Try to return the first result only."""
        count = len(info_of(best).outputs)
        return (self._tried(best, _first_result) or best) if count > 1 else best

    def _shortened(self, best: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
        """Use the earliest possible value of the same type in place of a node.

        If a cut keeps the error, then a shorter one usually does too, so the search is binary.
        """
        before = list(_substitutes(node))
        low, high = 0, len(before)
        shortest = best
        while low < high:
            middle = low if low == 0 and high == len(before) else (low + high) // 2
            smaller = self._tried(best, _bypass(node.name, before[middle].name))
            if smaller is not None:
                shortest, high = smaller, middle
            else:
                low = middle + 1
        return shortest

    def _tried(self, gm: fx.GraphModule, edit: Edit) -> fx.GraphModule | None:
        """Return the edited graph if it is smaller, valid, and has the same error."""
        smaller = clone(gm)
        edit(smaller)
        _clean(smaller)
        if len(smaller.graph.nodes) >= len(gm.graph.nodes) or check_graph(smaller):
            return None
        self.tries += 1
        if self.error_of(clone(smaller)) != self.error:
            return None
        self.follow(len(smaller.graph.nodes), self.tries)
        return smaller


def _find(gm: fx.GraphModule, name: str) -> fx.Node | None:
    return next((node for node in gm.graph.nodes if node.name == name), None)


def _substitutes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values of the same type from which a node is computed, from the first."""
    above = {node}
    for other in reversed(list(node.graph.nodes)):
        if other in above:
            above.update(other.all_input_nodes)
    kind = type_of(node)
    for other in node.graph.nodes:
        known = other in above and other is not node and other.op != "get_attr"
        if known and type_of(other) == kind:
            yield other


def _may_be_input(node: fx.Node) -> bool:
    kind = type_of(node)
    return isinstance(kind, ValueType) and kind.placement == REPLICATE and kind.role is None


def _bypass(name: str, other: str) -> Edit:
    def edit(gm: fx.GraphModule) -> None:
        node, before = _find(gm, name), _find(gm, other)
        assert node is not None and before is not None
        node.replace_all_uses_with(before)

    return edit


def _as_input(name: str) -> Edit:
    def edit(gm: fx.GraphModule) -> None:
        node = _find(gm, name)
        assert node is not None
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            placeholder = gm.graph.placeholder(f"{name}_in")
        placeholder.meta["type"] = type_of(node)
        node.replace_all_uses_with(placeholder)

    return edit


def _first_result(gm: fx.GraphModule) -> None:
    output = next(reversed(gm.graph.nodes))
    results = output.args[0]
    assert isinstance(results, list | tuple)
    output.args = (results[0],)
    gm.meta["tpcompile"] = replace(info_of(gm), outputs=info_of(gm).outputs[:1])


def _clean(gm: fx.GraphModule) -> None:
    """Drop unread nodes, inputs and parameters, and information about dropped nodes."""
    drop_dead(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op == "placeholder" and not node.users:
            gm.graph.erase_node(node)
    drop_unused_parameters(gm)
    info = info_of(gm)
    tensors = {tensor.name for node in parameters(gm.graph) for tensor in made_of(node)}
    biases = frozenset(pair for pair in info.biases if tensors.issuperset(pair))
    rotary = info.rotary if any(node.target == ROTARY for node in gm.graph.nodes) else None
    plan = info.plan and _plan_of(gm, info.plan)
    gm.meta["tpcompile"] = replace(info, biases=biases, rotary=rotary, plan=plan)


def _plan_of(gm: fx.GraphModule, plan: Plan) -> Plan:
    """Return the part of a plan that concerns nodes of the graph."""
    names = {node.name for node in gm.graph.nodes}
    heads = {name: layouts for name, layouts in plan.heads.items() if name in names}
    ffn = {name: layout for name, layout in plan.ffn.items() if name in names}
    return replace(plan, heads=heads, ffn=ffn)
