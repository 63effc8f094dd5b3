"""Reasons for placements and collectives: the rule of an op, and the readers of a collective."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import fx

from tpcompile.ir.meta import type_of
from tpcompile.ir.ops import RuleError, spec_of


def rule_of(node: fx.Node) -> list[Any] | None:
    """Return the name, the file and the line of the rule that infers a node's type."""
    spec = spec_of(node)
    return None if spec is None else _place_of(spec.rule)


@cache
def _place_of(rule: Callable[..., Any]) -> list[Any] | None:
    code = getattr(inspect.unwrap(rule), "__code__", None)
    if code is None:
        return None
    module = inspect.getmodule(rule)
    file = "" if module is None else f"{module.__name__.replace('.', '/')}.py"
    return [rule.__name__, file, code.co_firstlineno]


def needs_of(node: fx.Node) -> list[dict[str, str]]:
    """Return the readers of a collective that need it, and the rule that each would break without.

    Each reader's own rule decides: it gets the operand of the collective in place of its result.
    """
    spec = spec_of(node)
    if spec is None or spec.across is None or not isinstance(node.args[0], fx.Node):
        return []
    needs = []
    for reader in node.users:
        if reader.op == "output":
            needs.append(_need(reader, "result", str(type_of(node.args[0])), str(type_of(node))))
            continue
        error = _without(reader, node, node.args[0])
        if error is not None:
            needs.append(_need(reader, error.rule, error.got, error.expected))
    return needs


def _need(reader: fx.Node, rule: str, got: str, expected: str) -> dict[str, str]:
    return {"reader": reader.name, "rule": rule, "got": got, "expected": expected}


def _without(reader: fx.Node, node: fx.Node, source: fx.Node) -> RuleError | None:
    """Return the error of a reader's rule if it read `source` in place of `node`."""
    spec = spec_of(reader)
    if spec is None:
        return None

    def typed(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return type_of(source if arg is node else arg)
        if isinstance(arg, list | tuple):
            return tuple(map(typed, arg))
        return arg

    kwargs = {name: typed(arg) for name, arg in reader.kwargs.items()}
    try:
        spec.rule(**spec.bind(tuple(map(typed, reader.args)), kwargs))
    except RuleError as error:
        return error
    return None
