"""The changes that passes made to the expressions of values, for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from torch import fx

from tpcompile.ir.meta import captured_value
from tpcompile.ir.values.changed import changed_values
from tpcompile.ir.values.expressions import Expressions, GraphValues, called_values
from tpcompile.ir.values.named import Names
from tpcompile.ir.values.node import Term
from tpcompile.ir.values.scope import Rewrite
from tpcompile.ir.values.shown import differences, shown_difference
from tpcompile.ir.values.term import Terms
from tpcompile.ir.values.value import Value

Named = Callable[[fx.Node], tuple[str, Callable[[str], str]]]
"""A function from a node to its name in templates, and to a function that makes templates of
texts."""


class Prover(Protocol):
    """The expressions of the graph that passes change."""

    expressions: Expressions

    def values_of(self, gm: fx.GraphModule) -> GraphValues | None:
        """Return the values of the graph as it is now, None if it has none."""
        ...


@dataclass
class ProofRecorder:
    """The changes of expressions from one stage to the next."""

    prover: Prover
    _values: GraphValues | None = None
    _used: dict[str, tuple[Rewrite, ...]] = field(default_factory=dict)
    """The rewrites that the values of the last stage use, by captured value."""

    def changes(self, gm: fx.GraphModule, named: Named) -> dict[str, dict[str, Any]]:
        """Return the differences from the last stage: by name, the rewrites and both expressions.

        Names are those of templates if all layers agree, which the page looks up last. Expressions
        of a template are those of its first layer. A value that is unchanged has no entry, unless
        the template says something else.
        """
        old, self._values = self._values, self.prover.values_of(gm)
        before, self._used = self._used, self._rewrites(gm)
        if old is None or self._values is None:
            return {}
        changed = {node: pair for node, *pair in changed_values(old, self._values)}
        general: dict[str, dict[str, Any]] = {}
        special: dict[str, dict[str, Any]] = {}
        unchanged: list[fx.Node] = []
        names = _EarlierNames(self.prover.expressions.terms, self._values)
        for node in gm.graph.nodes:
            known = before.get(_meaning(node), ())
            added = [
                rewrite for rewrite in self._used.get(_meaning(node), ()) if rewrite not in known
            ]
            if not added and node not in changed:
                unchanged.append(node)
                continue
            name, template = named(node)
            entry = {"rewrites": [[rewrite.name, rewrite.says] for rewrite in added]}
            if name not in general:
                general[name] = entry | {"terms": names.terms(node, changed, template)}
            elif not _alike(general[name], entry, node in changed):
                special[node.name] = entry | {"terms": names.terms(node, changed, str)}
        special |= {node.name: {} for node in unchanged if named(node)[0] in general}
        return general | special

    def _rewrites(self, gm: fx.GraphModule) -> dict[str, tuple[Rewrite, ...]]:
        used = {
            _meaning(node): self.prover.expressions.rewrites_at(node) for node in gm.graph.nodes
        }
        return {meaning: rewrites for meaning, rewrites in used.items() if rewrites}


class _EarlierNames:
    """The names of the values of a graph, some of which are shown under earlier names."""

    def __init__(self, terms: Terms, values: GraphValues) -> None:
        self._terms, self._values = terms, values

    @cached_property
    def _names(self) -> Names:
        return Names(self._terms, called_values(self._values))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {node.name: place for place, node in enumerate(self._values.nodes)}

    def terms(
        self,
        node: fx.Node,
        changed: Mapping[fx.Node, Sequence[Value]],
        template: Callable[[str], str],
    ) -> list[str]:
        """Return the smallest difference of two expressions as text, nothing without a pair."""
        if node not in changed:
            return []
        until = self._places[node.name]

        def naming(term: Term) -> Any:
            name = self._names(term)
            return name if name is not None and self._places[name[0]] < until else None

        before, after = changed[node]
        pair = differences(before.body, after.body, naming)[-1]
        return [template(text) for text in shown_difference(*pair, naming)]


def _alike(known: dict[str, Any], entry: dict[str, Any], is_changed: bool) -> bool:
    return known["rewrites"] == entry["rewrites"] and bool(known["terms"]) == is_changed


def _meaning(node: fx.Node) -> str:
    return captured_value(node) or node.name
