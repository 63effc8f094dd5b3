"""The table of functions that lower nodes. Each instruction group registers its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from tpcompile.errors import UsageError
from tpcompile.ir.meta import operand
from tpcompile.vm.lowering.building import Building

Fits = Callable[[fx.Node], bool]
"""Whether the neighbours of a node allow an instruction group to lower it."""
Lower = Callable[[Building, fx.Node], None]
_Lower = TypeVar("_Lower", bound=Lower)


def always(node: fx.Node) -> bool:
    """Accept a node with any neighbours."""
    return True


def reads(*targets: Any) -> Fits:
    """Accept nodes whose first operand is a call of one of `targets`."""
    return lambda node: operand(node).target in targets


def read_by(*targets: Any) -> Fits:
    """Accept nodes whose users are the output or calls of `targets`."""
    return lambda node: all(user.op == "output" or user.target in targets for user in node.users)


@dataclass(frozen=True)
class Handler:
    """The function that lowers calls of one target, and the condition on their neighbours."""

    lower: Lower
    fits: Fits
    terms: bool = False
    """Whether the result may be one term per rank, to be summed over ranks."""


HANDLERS: dict[Any, Handler] = {}


def reads_terms(node: fx.Node) -> bool:
    """Accept nodes whose first operand is a call that may leave terms of a sum."""
    handler = HANDLERS.get(operand(node).target)
    return handler is not None and handler.terms


def lowers(*targets: Any, where: Fits = always, terms: bool = False) -> Callable[[_Lower], _Lower]:
    """Register the decorated function to lower calls of `targets`.

    With `terms`, it may leave terms in `terms_buffer`, for a sum over ranks.
    """

    def add(lower: _Lower) -> _Lower:
        for target in targets:
            if target in HANDLERS:
                raise UsageError(
                    f"{target} is lowered by two functions",
                    got=f"{lower.__module__} and {HANDLERS[target].lower.__module__}",
                )
            HANDLERS[target] = Handler(lower, where, terms)
        return lower

    return add
