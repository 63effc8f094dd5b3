"""Patterns over nodes, as data; a mismatch carries its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tpcompile.ir.meta import origin_of
from tpcompile.ir.ops import SPECS, op_name

Bindings = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """Any node, bound to a name; a repeated name must match the same node."""

    name: str


@dataclass(frozen=True)
class Number:
    """A numeric argument, bound to a name."""

    name: str


@dataclass(frozen=True)
class Call:
    """A call of `target` whose arguments match `args`, in either order if `commutes` is set."""

    target: Any
    args: tuple[Any, ...]
    commutes: bool = False


@dataclass(frozen=True)
class Maybe:
    """An optional call, such as a cast: `target` of a match of `inner`, or `inner` alone."""

    target: Any
    inner: Any


class MissError(Exception):
    """The refusal of a pattern or a check; a larger `depth` is closer to a match."""

    def __init__(self, node: fx.Node | None, reason: str, depth: int = 0) -> None:
        self.node, self.reason, self.depth = node, reason, depth
        super().__init__(reason)

    def __str__(self) -> str:
        if self.node is None:
            return self.reason
        origin = str(origin_of(self.node))
        return f"%{self.node.name}{f' ({origin})' if origin else ''}: {self.reason}"


def match(pattern: Any, value: Any) -> Bindings:
    """Return the bindings under which the pattern matches `value`, or raise MissError."""
    bindings: Bindings = {}
    _match(pattern, value, bindings, 0)
    return bindings


def _match(pattern: Any, value: Any, bindings: Bindings, depth: int) -> int:
    """Extend `bindings` and return the number of calls matched so far."""
    match pattern:
        case Value(name):
            _bind(name, value, bindings, depth)
        case Number(name):
            if not isinstance(value, int | float):
                raise MissError(
                    _node(value), f"expected a number {name}, got {_said(value)}", depth
                )
            bindings[name] = value
        case Call():
            return _match_call(pattern, value, bindings, depth)
        case Maybe(target, inner):
            there = isinstance(value, fx.Node) and value.target is target
            return _match(inner, value.args[0] if there else value, bindings, depth)
        case list() | tuple():
            return _match_list(pattern, value, bindings, depth)
        case _:
            if value != pattern:
                raise MissError(_node(value), f"expected {pattern}, got {_said(value)}", depth)
    return depth


def _match_list(patterns: Sequence[Any], value: Any, bindings: Bindings, depth: int) -> int:
    if not isinstance(value, list | tuple) or len(value) != len(patterns):
        raise MissError(
            _node(value), f"expected a list of {len(patterns)}, got {_said(value)}", depth
        )
    for part, item in zip(patterns, value, strict=True):
        depth = _match(part, item, bindings, depth)
    return depth


def _match_call(pattern: Call, value: Any, bindings: Bindings, depth: int) -> int:
    if not isinstance(value, fx.Node) or value.target is not pattern.target:
        spec = SPECS.get(pattern.target)
        wanted = spec.name if spec else getattr(pattern.target, "__name__", pattern.target)
        raise MissError(_node(value), f"expected {wanted}, got {_said(value)}", depth)
    orders = [pattern.args, pattern.args[::-1]] if pattern.commutes else [pattern.args]
    nearest: MissError | None = None
    for order in orders:
        trial = dict(bindings)
        try:
            reached = _match_args(order, value, trial, depth + 1)
        except MissError as miss:
            if nearest is None or miss.depth > nearest.depth:
                nearest = miss
        else:
            bindings.update(trial)
            return reached
    assert nearest is not None
    raise nearest


def _match_args(patterns: tuple[Any, ...], node: fx.Node, bindings: Bindings, depth: int) -> int:
    """Match the arguments of a call; arguments that the pattern omits must have their defaults."""
    spec = SPECS[node.target]
    given = list(spec.bind(node.args, dict(node.kwargs)).items())
    if len(given) < len(patterns):
        raise MissError(node, f"expected {len(patterns)} arguments, got {len(given)}", depth)
    for name, arg in given[len(patterns) :]:
        if arg != spec.defaults.get(name):
            raise MissError(node, f"the pattern does not allow {name}={_said(arg)}", depth)
    for part, (name, arg) in zip(patterns, given, strict=False):
        try:
            depth = _match(part, arg, bindings, depth)
        except MissError as miss:
            if miss.node is not None:
                raise
            raise MissError(node, f"argument {name}: {miss.reason}", miss.depth) from miss
    return depth


def _bind(name: str, value: Any, bindings: Bindings, depth: int) -> None:
    if not isinstance(value, fx.Node):
        raise MissError(None, f"expected a value {name}, got {_said(value)}", depth)
    if bindings.setdefault(name, value) is not value:
        raise MissError(value, f"{name} is already bound to %{bindings[name].name}", depth)


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _said(value: Any) -> str:
    if isinstance(value, fx.Node):
        return op_name(value) if value.op.startswith("call") else f"%{value.name}"
    return str(value)


def check(condition: object, node: fx.Node, reason: str, depth: int = 99) -> None:
    """Raise MissError unless the condition holds.

    Checks run after the pattern has matched, so the default depth exceeds that of any mismatch.
    """
    if not condition:
        raise MissError(node, reason, depth)
