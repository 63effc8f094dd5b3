"""Which function makes the instructions of a node: a table that each instruction group adds to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from tpcompile.errors import UsageError
from tpcompile.ir.meta import operand
from tpcompile.vm.lowering.building import Building

Fits = Callable[[fx.Node], bool]
"""Whether a node stands where an instruction group may have it."""
Lower = Callable[[Building, fx.Node], None]
_Lower = TypeVar("_Lower", bound=Lower)


def always(node: fx.Node) -> bool:
    """Whatever the neighbours of the node are."""
    return True


def reads(*targets: Any) -> Fits:
    """Where the first operand is a call of one of `targets`."""
    return lambda node: operand(node).target in targets


def read_by(*targets: Any) -> Fits:
    """Where only calls of `targets`, and the output, read the value."""
    return lambda node: all(user.op == "output" or user.target in targets for user in node.users)


@dataclass(frozen=True)
class Handler:
    """The function that lowers calls of one target, and where such calls may stand."""

    lower: Lower
    fits: Fits


HANDLERS: dict[Any, Handler] = {}


def lowers(*targets: Any, where: Fits = always) -> Callable[[_Lower], _Lower]:
    """Decorator of the function that lowers calls of `targets`."""

    def add(lower: _Lower) -> _Lower:
        for target in targets:
            if target in HANDLERS:
                raise UsageError(
                    f"{target} is lowered by two functions",
                    got=f"{lower.__module__} beside {HANDLERS[target].lower.__module__}",
                )
            HANDLERS[target] = Handler(lower, where)
        return lower

    return add
