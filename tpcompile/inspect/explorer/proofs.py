"""What passes did to the expressions of values, for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from tpcompile.ir.meta import captured_value
from tpcompile.ir.values.changed import changed_values
from tpcompile.ir.values.expressions import GraphValues
from tpcompile.ir.values.scope import Rewrite
from tpcompile.ir.values.shown import difference, shown
from tpcompile.ir.values.value import Value

Named = Callable[[fx.Node], tuple[str, Callable[[str], str]]]
"""The name of a node in templates, and a function that makes a template of a text beside it."""


class Prover(Protocol):
    """The expressions of the graph that passes change."""

    def values_of(self, gm: fx.GraphModule) -> GraphValues | None:
        """Return the values of the graph as it is now, None if it has none."""
        ...

    def rewrites_at(self, node: fx.Node) -> tuple[Rewrite, ...]:
        """Return the rewrites that the value of a node uses."""
        ...


@dataclass
class ProofRecorder:
    """The changes of expressions from one stage to the next."""

    prover: Prover
    _values: GraphValues | None = None
    _used: dict[str, tuple[Rewrite, ...]] = field(default_factory=dict)
    """The rewrites that the values of the last stage use, by captured value."""

    def changes(self, gm: fx.GraphModule, named: Named) -> dict[str, dict[str, Any]]:
        """Return what is not as in the last stage: by name, the rewrites and both expressions.

        Names are those of templates if all layers agree, which the page looks up last. Expressions
        of a template are those of its first layer. A value that is unchanged has no entry, unless
        the template says something else.
        """
        old, self._values = self._values, self.prover.values_of(gm)
        before, self._used = self._used, self._rewrites(gm)
        if old is None or self._values is None:
            return {}
        changed = {node: pair for node, *pair in changed_values(gm, old, self._values)}
        general: dict[str, dict[str, Any]] = {}
        special: dict[str, dict[str, Any]] = {}
        kept: list[fx.Node] = []
        for node in gm.graph.nodes:
            known = before.get(_meaning(node), ())
            added = [own for own in self._used.get(_meaning(node), ()) if own not in known]
            if not added and node not in changed:
                kept.append(node)
                continue
            name, template = named(node)
            entry = {"rewrites": [[own.name, own.says] for own in added]}
            if name not in general:
                general[name] = entry | {"terms": _terms(changed.get(node, []), template)}
            elif not _alike(general[name], entry, node in changed):
                special[node.name] = entry | {"terms": _terms(changed.get(node, []), str)}
        special |= {node.name: {} for node in kept if named(node)[0] in general}
        return general | special

    def _rewrites(self, gm: fx.GraphModule) -> dict[str, tuple[Rewrite, ...]]:
        used = {_meaning(node): self.prover.rewrites_at(node) for node in gm.graph.nodes}
        return {meaning: rewrites for meaning, rewrites in used.items() if rewrites}


def _terms(pair: Sequence[Value], template: Callable[[str], str]) -> list[str]:
    """Return the smallest difference of two expressions as text, nothing without a pair."""
    if not pair:
        return []
    before, after = pair
    return [template(shown(term)) for term in difference(before.body, after.body)]


def _alike(known: dict[str, Any], entry: dict[str, Any], is_changed: bool) -> bool:
    return known["rewrites"] == entry["rewrites"] and bool(known["terms"]) == is_changed


def _meaning(node: fx.Node) -> str:
    return captured_value(node) or node.name
