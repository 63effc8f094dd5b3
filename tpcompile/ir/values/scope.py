"""The surroundings of a rule: the table of terms, other ops, and the state that ops overwrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpcompile.ir.values.term import Term, Terms
from tpcompile.ir.values.value import Value

OPERANDS, REWRITES, STATES = 0, 1, 2
"""What a call depends on: its operands alone, also rewrites, or also what other calls wrote."""


@dataclass(frozen=True)
class Rewrite:
    """An equality that is not one of real numbers alone, which a pass declares to use it.

    Rules of ops consult it: under the rewrite they return the value of what the pass replaces.
    """

    name: str
    says: str
    """The equality, and what it leaves out, as a sentence."""
    adds_states: bool = False
    """Whether the graph may keep more than before, such as a cache."""


class Kept(NamedTuple):
    """The state of one layer of an input that ops overwrite, such as the KV cache."""

    term: Term
    interleaved: bool = False
    written: tuple[Value, ...] = ()
    """What the step has written, if it is all that has been written since the step began."""
    initial: bool = False
    """Whether the step has written nothing yet."""


@dataclass
class Scope:
    """The surroundings in which the calls of one graph are read, in order."""

    terms: Terms
    interpret: Callable[[Any, tuple[Any, ...]], Any]
    """Function that returns the value of a call, given its target and its arguments."""
    rewrites: frozenset[Rewrite] = frozenset()
    inputs: dict[str, Value] = field(default_factory=dict)
    states: dict[tuple[Term, int], Kept] = field(default_factory=dict)
    """What has been written, by the input and its layer."""
    left_out: dict[Term, None] = field(default_factory=dict)
    """The calls that rewrites have replaced; what a rewrite leaves out must not change either."""
    depends: int = OPERANDS
    """What the value of the current call depends on."""

    def allows(self, rewrite: Rewrite) -> bool:
        """Return whether a pass has declared a rewrite."""
        self.depends |= REWRITES
        return rewrite in self.rewrites

    def leave_out(self, value: Value) -> None:
        """Record a call, the value of which is that of another one under a rewrite."""
        self.depends |= STATES
        self.left_out[value.body] = None

    def state(self, kept: Value, layer: int) -> Kept:
        """Return the state of a layer, which is that before the step until it is written."""
        self.depends |= STATES
        known = self.states.get((kept.body, layer))
        if known is not None:
            return known
        whole = self.terms.whole(kept.shape, kept.body)
        return Kept(self.terms.call(("state", layer), [whole]), initial=True)

    def write(self, kept: Value, layer: int, state: Kept) -> None:
        self.depends |= STATES
        self.states[kept.body, layer] = state
