"""Graph edits shared by passes: insert, fuse, replace and erase nodes, and report matches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from tpcompile.errors import PassError
from tpcompile.ir.info import model_of
from tpcompile.ir.meta import captured_value, origin_of
from tpcompile.ir.ops import EXPERTS, LINEAR, RMS_NORM, SPECS
from tpcompile.ir.refusals import keep_refusal, pass_refusals_on
from tpcompile.ir.text import format_node
from tpcompile.ir.types import ValueType
from tpcompile.rewriting.pattern import Bindings, Call, MissError, check, match, match_calls


@dataclass
class Report:
    """The result of a pass: its number of matches, and the refusal closest to a match."""

    matches: int = 0
    nearest: MissError | None = field(default=None)

    def miss(self, miss: MissError, node: fx.Node | None = None) -> None:
        """Record a refusal if it is the closest yet; store its reason on the unfused `node`."""
        if node is not None:
            keep_refusal(node, miss.depth, str(miss))
        if self.nearest is None or miss.depth > self.nearest.depth:
            self.nearest = miss

    def require(self, gm: fx.GraphModule, noun: str, *produced: Any) -> Report:
        """Raise PassError if nothing matched, unless the graph already has an op in `produced`."""
        if self.matches or any(node.target in produced for node in gm.graph.nodes):
            return self
        nearest = f"only the near miss {self.nearest}" if self.nearest else "no candidate"
        line = format_node(self.nearest.node) if self.nearest and self.nearest.node else ""
        raise PassError(
            f"There is no {noun} in the graph of {model_of(gm.graph)}",
            got=nearest + (f", in {line}" if line else ""),
            expected=f"at least one {noun}",
            hint="The model computes this in a form that tpcompile does not recognise",
        )


Replacement = Callable[[fx.Node, Bindings], fx.Node]


def rewrite(gm: fx.GraphModule, pattern: Call, replacement: Replacement) -> Report:
    """Replace every node that the pattern matches; `replacement` may refuse with MissError."""
    report = Report()
    for node in list(gm.graph.nodes):
        if node.target is not pattern.target:
            continue
        try:
            bindings = match(pattern, node)
            with gm.graph.inserting_before(node):
                new = replacement(node, bindings)
        except MissError as miss:
            report.miss(miss)
            continue
        replace(node, new)
        report.matches += 1
    drop_dead(gm.graph)
    return report


def rewrite_each(gm: fx.GraphModule, rules: Iterable[tuple[Call, Replacement]]) -> Report:
    """Run `rewrite` with every pattern and its replacement, one after the other."""
    report = Report()
    for pattern, replacement in rules:
        next_report = rewrite(gm, pattern, replacement)
        report.matches += next_report.matches
        if next_report.nearest is not None:
            report.miss(next_report.nearest)
    return report


def fuse_each(gm: fx.GraphModule, target: Any, fuse: Callable[[fx.Graph, fx.Node], None]) -> Report:
    """Run `fuse` at every call of `target`; it may refuse with MissError.

    As in `rewrite`, it inserts before that call.
    """
    return fuse_at(gm, ((node, partial(fuse, gm.graph, node)) for node in calls(gm, target)))


def fuse_at(gm: fx.GraphModule, sites: Iterable[tuple[fx.Node, Callable[[], None]]]) -> Report:
    """Run the fusion of every site, which may refuse with MissError.

    It inserts before the node of the site, on which the reason is stored. `sites` is consumed
    lazily, so later sites may depend on earlier fusions.
    """
    report = Report()
    for node, fuse in sites:
        try:
            with gm.graph.inserting_before(node):
                fuse()
            report.matches += 1
        except MissError as miss:
            report.miss(miss, node)
    drop_dead(gm.graph)
    return report


def fuse_calls(gm: fx.GraphModule, target: Any) -> Report:
    """Replace the calls in the body of a composite op with one call of the op."""
    return fuse_each(gm, SPECS[target].pattern.target, partial(fuse_call, target))


def fuse_call(target: Any, graph: fx.Graph, node: fx.Node) -> None:
    """Replace the calls that end with `node` with a call of a composite op, or raise MissError."""
    bindings = absorbed(SPECS[target].pattern, node)
    with graph.inserting_before(node):
        new = insert_bound(node, target, bindings)
    replace(node, new)
    graph.erase_node(node)


def absorbed(pattern: Any, value: Any, *readers: fx.Node) -> Bindings:
    """Match a pattern of calls that a fused op absorbs, or raise MissError.

    `value` is the last call, or a list of values that only `readers` read. A norm that other
    linears read stays for them; each op that absorbs it computes it again.
    """
    bindings, nodes = match_calls(pattern, value)
    inside = [node for node in nodes if node is not value]
    shared = {node for node in inside if node.target is RMS_NORM and _feeds_linears(node)}
    check_absorbed([node for node in inside if node not in shared], value, *readers)
    return bindings


def _feeds_linears(norm: fx.Node) -> bool:
    return all(user.target in (LINEAR, EXPERTS) for user in norm.users)


def check_absorbed(inside: Collection[fx.Node], *readers: fx.Node) -> None:
    """Refuse to absorb a value that a node outside `inside` and `readers` also reads."""
    for node in inside:
        for user in node.users:
            check(user in inside or user in readers, node, f"%{user.name} also reads it")


def insert(like: fx.Node, target: Any, *args: Any, name: str | None = None) -> fx.Node:
    """Insert a call with the origin of `like`, named after its op unless `name` is given.

    Its place is that of the graph: in `rewrite`, `fuse_each` and `fuse_at` before the node that is
    replaced, elsewhere that of `graph.inserting_before(…)`, which is required.
    """
    name = name or SPECS[target].name.split(".")[1]
    node = like.graph.create_node("call_function", target, args, name=name)
    node.meta["origin"] = origin_of(like)
    return node


def insert_bound(like: fx.Node, target: Any, bound: Bindings) -> fx.Node:
    """Insert a call with its arguments by name; defaults at the end are left out."""
    spec = SPECS[target]
    names = list(spec.argument_names)
    while names[-1] in spec.defaults and bound.get(names[-1]) == spec.defaults[names[-1]]:
        names.pop()
    return insert(like, target, *(bound[name] for name in names))


def insert_item(like: fx.Node, source: fx.Node, index: int, name: str) -> fx.Node:
    """Insert a getitem for one result of an op that has several."""
    return insert(like, operator.getitem, source, index, name=name)


def insert_after(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Insert a call right after `node`."""
    with node.graph.inserting_after(node):
        return insert(node, target, *args)


def insert_input(after: fx.Node, name: str, kind: ValueType) -> fx.Node:
    """Insert an input of the graph after another one."""
    with after.graph.inserting_after(after):
        placeholder = after.graph.placeholder(name)
    placeholder.meta |= {"type": kind, "origin": origin_of(after)}
    return placeholder


def replace(old: fx.Node, new: fx.Node) -> None:
    """Redirect every reader of `old`, except `new` itself, to `new`, which has the same value."""
    new.meta["type"] = old.meta["type"]
    if captured_value(new) is None:
        new.meta["value"] = captured_value(old)
    pass_refusals_on(old, new)
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def drop_dead(graph: fx.Graph) -> None:
    """Eliminate dead nodes other than inputs."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def drop_unused_parameters(gm: fx.GraphModule) -> None:
    """Delete parameters that no node reads."""
    used = {node.target for node in gm.graph.nodes if node.op == "get_attr"}
    for name in [name for name in gm._parameters if name not in used]:
        del gm._parameters[name]
