"""The surroundings of a rule: the table of terms, other ops, and the state that ops overwrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpcompile.ir.values.term import Term, Terms
from tpcompile.ir.values.value import Value


class Kept(NamedTuple):
    """The state of one layer of an input that ops overwrite, such as the KV cache."""

    term: Term
    interleaved: bool = False


@dataclass
class Scope:
    """The surroundings in which the calls of one graph are read, in order."""

    terms: Terms
    interpret: Callable[[Any, tuple[Any, ...]], Any]
    """Function that returns the value of a call, given its target and its arguments."""
    states: dict[tuple[Term, int], Kept] = field(default_factory=dict)
    """What has been written, by the input and its layer."""
    touched: bool = False
    """Whether a rule has read or written a state, so its call has another value elsewhere."""

    def state(self, kept: Value, layer: int) -> Kept:
        """Return the state of a layer, which is that before the step until it is written."""
        self.touched = True
        known = self.states.get((kept.body, layer))
        if known is not None:
            return known
        return Kept(self.terms.call(("state", layer), [self.terms.whole(kept.shape, kept.body)]))

    def write(self, kept: Value, layer: int, state: Kept) -> None:
        self.touched = True
        self.states[kept.body, layer] = state
