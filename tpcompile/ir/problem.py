"""Violations of rules at nodes of a graph, merged where they repeat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx

from tpcompile.ir.meta import origin_of
from tpcompile.ir.ops import RuleError
from tpcompile.ir.text import format_node
from tpcompile.ir.text.folding import folded

_MOST_NAMES = 8
_LAYER = re.compile(r"(?<=\.)[0-9]+(?=\.)|(?<=%l)[0-9]+(?=_)")
"""The number of a layer in the name of a tensor or of a value."""
_LATER_NUMBERS = re.compile(r"(?<=[0-9])(\D+)[0-9]+")


@dataclass(frozen=True)
class Problem:
    """A violation of a rule at one node of a graph."""

    node: str
    source: str
    rule: str
    got: str
    expected: str
    hint: str
    line: str
    details: tuple[str, ...] = ()
    """Further lines, such as the whole expressions that contain `got` and `expected`."""
    others: tuple[str, ...] = ()
    """The other nodes that break the rule alike."""

    @property
    def key(self) -> tuple[str, ...]:
        """The text about the node, which is the same for the same mistake in other layers."""
        got, expected = (_LAYER.sub("*", text) for text in (self.got, self.expected))
        return self.rule, got, expected, self.hint

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        hint = f" {self.hint[0].upper()}{self.hint[1:]}." if self.hint else ""
        place = f" ({self.source})" if self.source else ""
        message = (
            f"%{self.node}{place} breaks the rule {self.rule}: found {self.got}; "
            f"expected {self.expected}.{hint}"
        )
        nodes = (self.node, *self.others)
        places = (f"{len(nodes)} nodes break this rule: {_listed(nodes)}",) if self.others else ()
        return "\n    ".join((message, *self.details, self.line, *places))


def _listed(names: Sequence[str]) -> str:
    """Return names as text, such as `%l{0..27}_o_proj`; in many names, `*` is a later number."""
    texts = folded(names)
    if len(texts) > _MOST_NAMES:
        texts = folded(_LATER_NUMBERS.sub(r"\1*", name) for name in names)
    more = [f"{len(texts) - _MOST_NAMES} other names"] if len(texts) > _MOST_NAMES else []
    return ", ".join([*(f"%{text}" for text in texts[:_MOST_NAMES]), *more])


def problem_of(node: fx.Node, error: RuleError) -> Problem:
    return Problem(
        node=node.name,
        source=str(origin_of(node)),
        rule=error.rule,
        got=error.got,
        expected=error.expected,
        hint=error.hint,
        line=format_node(node),
    )


def merged(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems that differ only in their node as one, which names the other nodes."""
    groups: dict[Any, Problem] = {}
    for problem in problems:
        first = groups.setdefault(problem.key, problem)
        if first is not problem:
            names = dict.fromkeys((*first.others, problem.node, *problem.others))
            groups[first.key] = replace(first, others=tuple(names))
    return list(groups.values())
