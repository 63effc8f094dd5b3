"""Matches of patterns with nodes; a mismatch carries its reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from tpcompile.ir.meta import origin_of
from tpcompile.ir.ops import LINEAR, RMS_NORM, SPECS, arguments_of, op_name
from tpcompile.ir.pattern import Call, Maybe, Number, Optional, Unknown, Value

__all__ = ["Bindings", "Call", "Maybe", "MissError", "Number", "Value", "check", "match"]

Bindings = dict[str, Any]
_Found = dict[str | Call, Any]
"""The values by name, and the node that each call matched."""
_CHECKED = 99
"""The depth of a refusal by a check, which exceeds that of any mismatch."""


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
    return match_calls(pattern, value)[0]


def matches(pattern: Any, value: Any) -> bool:
    try:
        match(pattern, value)
    except MissError:
        return False
    return True


def match_calls(pattern: Any, value: Any) -> tuple[Bindings, list[fx.Node]]:
    """Return the bindings of a match and the nodes that its calls match, or raise MissError."""
    matched: _Found = {}
    _match(pattern, value, matched, 0)
    bindings = {name: value for name, value in matched.items() if isinstance(name, str)}
    return bindings, [node for call, node in matched.items() if isinstance(call, Call)]


def _match(pattern: Any, value: Any, matched: _Found, depth: int) -> int:
    """Extend `matched` and return the number of calls matched so far."""
    match pattern:
        case Value() | Number():
            _bind(pattern, value, matched, depth)
        case Call():
            return _match_call(pattern, value, matched, depth)
        case Maybe(target, inner):
            return _match(inner, value.args[0] if _calls(value, target) else value, matched, depth)
        case Optional(call):
            if _calls(value, call.target):
                return _match_call(call, value, matched, depth)
            inner, *omitted = call.args
            matched.update((part.name, None) for part in omitted if isinstance(part, Value))
            return _match(inner, value, matched, depth)
        case list() | tuple():
            return _match_list(pattern, value, matched, depth)
        case Unknown():
            pass
        case _:
            if value != pattern:
                raise MissError(_node(value), f"expected {pattern}, got {_shown(value)}", depth)
    return depth


def _match_list(patterns: Sequence[Any], value: Any, matched: _Found, depth: int) -> int:
    if not isinstance(value, list | tuple) or len(value) != len(patterns):
        raise MissError(
            _node(value), f"expected a list of {len(patterns)}, got {_shown(value)}", depth
        )
    for part, item in zip(patterns, value, strict=True):
        depth = _match(part, item, matched, depth)
    return depth


def _match_call(pattern: Call, value: Any, matched: _Found, depth: int) -> int:
    if not _calls(value, pattern.target):
        raise _other_call(pattern.target, value, depth)
    if pattern in matched:
        if matched[pattern] is not value:
            raise MissError(value, f"expected %{matched[pattern]}, got %{value}", depth)
        return depth
    matched[pattern] = value
    if not pattern.commutes:
        return _match_args(pattern.args, value, matched, depth + 1)
    nearest: MissError | None = None
    for order in (pattern.args, pattern.args[::-1]):
        trial = dict(matched)
        try:
            reached = _match_args(order, value, trial, depth + 1)
        except MissError as miss:
            if nearest is None or miss.depth > nearest.depth:
                nearest = miss
        else:
            matched.update(trial)
            return reached
    assert nearest is not None
    raise nearest


def _match_args(patterns: tuple[Any, ...], node: fx.Node, matched: _Found, depth: int) -> int:
    """Match the arguments of a call; arguments that the pattern omits must have their defaults."""
    spec = SPECS[node.target]
    arguments = list(arguments_of(node).items())
    if len(arguments) < len(patterns):
        raise MissError(node, f"expected {len(patterns)} arguments, got {len(arguments)}", depth)
    for name, arg in arguments[len(patterns) :]:
        if arg != spec.defaults.get(name):
            raise MissError(node, f"the pattern does not allow {name}={_shown(arg)}", depth)
    for part, (name, arg) in zip(patterns, arguments, strict=False):
        try:
            depth = _match(part, arg, matched, depth)
        except MissError as miss:
            if miss.node is not None:
                raise
            about_node = miss.reason.startswith("its ")  # and not about the argument
            reason = miss.reason if about_node else f"argument {name}: {miss.reason}"
            raise MissError(node, reason, miss.depth) from miss
    return depth


def _bind(pattern: Value | Number, value: Any, matched: _Found, depth: int) -> None:
    name, known = pattern.name, matched.setdefault(pattern.name, value)
    if isinstance(pattern, Number):
        if not isinstance(value, int | float):
            raise MissError(_node(value), f"expected a number {name}, got {_shown(value)}", depth)
        if known != value:
            raise MissError(None, f"{pattern.unequal}, got {[known, value]}", _CHECKED)
        return
    if not isinstance(value, fx.Node) and not (pattern.optional and value is None):
        raise MissError(None, f"expected a value {name}, got {_shown(value)}", depth)
    if known is not value:
        raise MissError(_node(value), f"{name} is already bound to %{known}", depth)


def _other_call(target: Any, value: Any, depth: int) -> MissError:
    """Return the refusal of a value that is not a call of `target`."""
    if target is RMS_NORM:
        return MissError(None, f"its input %{value} is not an RMS norm", depth)
    spec = SPECS.get(target)
    wanted = spec.name if spec else getattr(target, "__name__", target)
    linear = "it is not a linear" if target is LINEAR else ""
    return MissError(_node(value), linear or f"expected {wanted}, got {_shown(value)}", depth)


def _calls(value: Any, target: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is target


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _shown(value: Any) -> str:
    if isinstance(value, fx.Node):
        return op_name(value) if value.op.startswith("call") else f"%{value.name}"
    return str(value)


def check(condition: object, node: fx.Node, reason: str, depth: int = _CHECKED) -> None:
    """Raise MissError unless the condition holds."""
    if not condition:
        raise MissError(node, reason, depth)
