"""Proofs of passes: the outputs after a pass are the expressions that they were before it.

A pass may declare `rewrites`, equalities that it uses beyond those of expressions: it rounds
elsewhere, or adds a cache. Under them, the graph before and the graph after must agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx

from tpcompile.ir.meta import origin_of
from tpcompile.ir.names import base_name
from tpcompile.ir.ops import op_name, package_of, spec_of
from tpcompile.ir.problem import Problem
from tpcompile.ir.text import format_node
from tpcompile.ir.values.changed import earlier_values
from tpcompile.ir.values.expressions import Expressions, GraphValues, UnprovedError, called_values
from tpcompile.ir.values.named import Names, Naming
from tpcompile.ir.values.node import Term
from tpcompile.ir.values.scope import Rewrite
from tpcompile.ir.values.shown import differences, shown_difference, shown_short
from tpcompile.ir.values.value import Value
from tpcompile.rewriting.structure import output_of


@dataclass(frozen=True)
class Difference:
    """A result of a graph, and the different result of another graph."""

    name: str
    before: Term | None
    after: Term | None
    naming: Naming = field(default=lambda term: None, compare=False)
    """The names of values that both graphs have."""

    def __str__(self) -> str:
        got, expected = self.sides
        was, now = self.wholes
        part = "" if now == got else f"{self.name} has {got}, not {expected}: "
        return f"{part}before the pass {was}; after it {now}"

    @cached_property
    def sides(self) -> tuple[str, str]:
        """The smallest difference between the computed and the required expression."""
        was, now = self.wholes
        if not self._path or (len(self._path) == 1 and was != now):
            return now, was
        right, wrong = shown_difference(*self._path[-1], self.naming)
        return wrong, right

    @cached_property
    def wholes(self) -> tuple[str, str]:
        """The result before the pass, and after it."""
        terms = [term for term in (self.before, self.after) if term is not None]
        texts = iter(shown_short(terms, self.naming, self._path[:-1]))
        was, now = (
            f"no {self.name}" if term is None else f"{self.name} = {next(texts)}"
            for term in (self.before, self.after)
        )
        return was, now

    @cached_property
    def _path(self) -> list[tuple[Term, Term]]:
        """The pairs of parts that differ, from both results to the smallest."""
        if self.before is None or self.after is None:
            return []
        return differences(self.before, self.after, self.naming)

    @property
    def details(self) -> tuple[str, ...]:
        """Both results, if the difference is less than everything."""
        was, now = self.wholes
        if was == now or now in self.sides:
            return ()
        return f"before the pass: {was}", f"after the pass:  {now}"


@dataclass
class Prover:
    """Proves passes one after another; graphs share a table of expressions."""

    expressions: Expressions = field(default_factory=Expressions)
    _rewrites: frozenset[Rewrite] = frozenset()
    _values: GraphValues | None = None
    _unproved: str = ""

    def declare(self, current: Any) -> None:
        """Allow the rewrites of a pass from now on."""
        self._rewrites |= frozenset(rewrites_of(current))

    def values_of(self, gm: fx.GraphModule) -> GraphValues | None:
        """Return the values of the graph as it is now, None if an op has no expression."""
        if self._values is None:
            self._read(gm)
        return self._values

    def before(self, gm: fx.GraphModule, current: Any) -> None:
        """Read the graph that a pass is about to change."""
        known = self._rewrites
        self.declare(current)
        if self._values is None or self._rewrites != known:
            self._read(gm)

    def after(self, gm: fx.GraphModule, current: Any) -> tuple[Problem | None, str]:
        """Return the change of a value that a pass does not declare, and why it is not proved.

        A pass of another package that declares nothing is neither proved nor refused; nor is a
        graph with an op of another package without a rule.
        """
        old, unread = self._values, self._unproved
        self._read(gm)
        if self._unproved or old is None:
            return None, self._unproved or unread
        assert self._values is not None
        difference = self._difference(old, self._values, current)
        if difference is None:
            return None, ""
        problem, difference = self._located(gm, old, self._values, difference)
        if not declares(current):
            return None, f"it declares no rewrites, and {difference}"
        unknown = _unknown_op(gm)
        if unknown:
            return None, f"{unknown} has no rule of values, and {difference}"
        return problem, ""

    def _located(
        self, gm: fx.GraphModule, old: GraphValues, new: GraphValues, difference: Difference
    ) -> tuple[Problem, Difference]:
        """Return the problem of the first node that makes a wrong value, and its difference."""
        mistakes = self.expressions.mistakes(gm, earlier_values(old, new), self._rewrites)
        wrong = list(mistakes)
        node = wrong[0][0] if wrong else output_of(gm.graph)
        if wrong:
            _, before, after = wrong[0]
            difference = Difference(f"%{node.name}", before.body, after.body)
        known = _named_before(old, difference.before) | called_values(new, node)
        difference = replace(difference, naming=Names(self.expressions.terms, known))
        got, expected = difference.sides
        problem = Problem(
            node=node.name,
            source=str(origin_of(node)),
            rule="values",
            got=got,
            expected=f"{expected}, as before the pass",
            hint="correct the pass, or let it declare the rewrite that it uses: docs/proofs.md "
            "says how to read expressions",
            line=format_node(node),
            details=difference.details,
            others=tuple(other.name for other, *_ in wrong[1:]),
        )
        return problem, difference

    def _read(self, gm: fx.GraphModule) -> None:
        try:
            self._values, self._unproved = self.expressions.of(gm, self._rewrites), ""
        except UnprovedError as error:
            self._values, self._unproved = None, str(error)

    def _difference(self, old: GraphValues, new: GraphValues, current: Any) -> Difference | None:
        expected = list(old.outputs)
        for target in getattr(current, "adds_results", ()):
            if len(expected) < len(new.outputs):
                expected.append(self.expressions.result(target, expected[0]))
        rewrites = rewrites_of(current)
        states = any(rewrite.adds_states for rewrite in rewrites)
        reordered = any(rewrite.reorders_states for rewrite in rewrites)
        return (
            _of_outputs(expected, new.outputs)
            or _of_states(old, new, states, reordered)
            or _of_left_out(old.left_out, new.left_out, states)
        )


def _unknown_op(gm: fx.GraphModule) -> str:
    """Return the first op of another package that has no rule of values, or an empty text."""
    for node in gm.graph.nodes:
        spec = spec_of(node)
        if spec is not None and spec.value is None and package_of(node):
            return spec.name
    return ""


def differs(old: GraphValues, new: GraphValues) -> Difference | None:
    """Return the first different result of two graphs under the same rewrites, or None."""
    return (
        _of_outputs(old.outputs, new.outputs)
        or _of_states(old, new, False)
        or _of_left_out(old.left_out, new.left_out, False)
    )


def rewrites_of(current: Any) -> tuple[Rewrite, ...]:
    """Return the rewrites that a pass declares."""
    declared: tuple[Rewrite, ...] = getattr(current, "rewrites", ())
    return declared


def declares(current: Any) -> bool:
    """Return whether a pass says what it changes; passes of tpcompile do."""
    package = type(current).__module__.partition(".")[0]
    return hasattr(current, "rewrites") or package == __name__.partition(".")[0]


def _of_outputs(old: Iterable[Value], new: Iterable[Value]) -> Difference | None:
    before, after = tuple(old), tuple(new)
    for place, (left, right) in enumerate(zip(before, after, strict=False)):
        if (left.shape, left.dtype, left.body) != (right.shape, right.dtype, right.body):
            return Difference(f"result {place}", left.body, right.body)
    if len(before) == len(after):
        return None
    extra = max(before, after, key=len)[min(len(before), len(after))].body
    return Difference("a result", *(extra, None) if len(before) > len(after) else (None, extra))


def _of_states(
    old: GraphValues, new: GraphValues, may_add: bool, may_reorder: bool = False
) -> Difference | None:
    for key, state in old.states.items():
        source, layer = key
        name = f"layer {layer} of %{_name_of(source)}"
        other = new.states.get(key)
        if other is None or other.term is not state.term:
            return Difference(name, state.term, other and other.term)
        if other.interleaved != state.interleaved and not may_reorder:
            return Difference(f"the order within heads of {name}", state.term, None)
    for key, state in new.states.items():
        if key not in old.states and not may_add:
            return Difference(f"layer {key[1]} of %{_name_of(key[0])}", None, state.term)
    return None


def _name_of(source: Term) -> str:
    while source.kind == "read":
        source = source.args[0]
    return str(source.head[0])


def _of_left_out(old: frozenset[Term], new: frozenset[Term], may_add: bool) -> Difference | None:
    missing = [term for term in old if term not in new]
    added = [] if may_add and not missing else [term for term in new if term not in old]
    if not missing and not added:
        return None
    before, after = (min(terms, key=_number, default=None) for terms in (missing, added))
    return Difference("a call under a rewrite", before, after)


def _named_before(values: GraphValues, result: Term | None) -> dict[str, Value]:
    """Return the values before a result that have the name of a role, not only that of an op."""
    same = (n for n, v in values.nodes.items() if isinstance(v, Value) and v.body is result)
    known = called_values(values, next(same, None))
    roles = {n.name for n in values.nodes if not op_name(n).endswith(f"aten.{base_name(n)}")}
    return {name: value for name, value in known.items() if name in roles}


def _number(term: Term) -> int:
    return term.number
