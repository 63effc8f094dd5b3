"""The surroundings of a rule: the table of terms, other ops, and the state that ops overwrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpcompile.ir.values.node import Term
from tpcompile.ir.values.term import Terms
from tpcompile.ir.values.value import Value


@dataclass(frozen=True)
class Rewrite:
    """An equality beyond those of real numbers, which a pass declares in order to use it.

    Rules of ops consult it: under the rewrite they return the value of the calls that the pass
    replaces.
    """

    name: str
    says: str
    """The equality and its limits, as a sentence."""
    adds_states: bool = False
    """Whether the graph may keep further states, such as a cache."""
    reorders_states: bool = False
    """Whether its states may be in another order within heads."""


class LayerState(NamedTuple):
    """The state of one layer of an input that ops overwrite, such as the KV cache."""

    term: Term
    interleaved: bool = False
    written: tuple[Value, ...] = ()
    """The values written by the step, if nothing else has been written since it began."""
    initial: bool = False
    """Whether the step has written nothing yet."""


class Event(NamedTuple):
    """A question of a rule with its answer, or a change of a state."""

    kind: str
    subject: Any
    answer: Any


@dataclass
class Scope:
    """The surroundings in which the calls of one graph are read, in order."""

    terms: Terms
    interpret: Callable[[Any, tuple[Any, ...]], Any]
    """Function that returns the value of a call, given its target and its arguments."""
    rewrites: frozenset[Rewrite] = frozenset()
    inputs: dict[str, Value] = field(default_factory=dict)
    states: dict[tuple[Term, int], LayerState] = field(default_factory=dict)
    """The states of written inputs, by input and layer."""
    left_out: dict[Term, None] = field(default_factory=dict)
    """The calls that rewrites have replaced; these must not change either."""
    events: list[Event] = field(default_factory=list)
    """The questions and actions of the current call besides reading its operands."""

    def allows(self, rewrite: Rewrite) -> bool:
        """Return whether a pass has declared a rewrite."""
        return bool(self._ask("allows", rewrite))

    def input(self, name: str) -> Value | None:
        """Return an input of the graph, None if it has no such input."""
        value: Value | None = self._ask("input", name)
        return value

    def state(self, states: Value, layer: int) -> LayerState:
        """Return the state of a layer, which is that before the step until it is written."""
        known: LayerState | None = self._ask("state", (states.body, layer))
        if known is not None:
            return known
        whole = self.terms.whole(states.shape, states.body)
        return LayerState(self.terms.call(("state", layer), [whole]), initial=True)

    def write(self, states: Value, layer: int, state: LayerState) -> None:
        """Replace the state of a layer."""
        self._do("write", (states.body, layer), state)

    def leave_out(self, value: Value) -> None:
        """Record a call that a rewrite has replaced."""
        self._do("leave out", value.body, None)

    def replay(self, events: Sequence[Event]) -> bool:
        """Repeat the actions of a call, if all of its questions have the same answers."""
        written: dict[Any, LayerState] = {}
        for kind, subject, answer in events:
            if kind == "write":
                written[subject] = answer
            elif kind == "state" and subject in written:
                continue
            elif kind != "leave out" and self._answer(kind, subject) != answer:
                return False
        for kind, subject, answer in events:
            if kind in ("write", "leave out"):
                self._do(kind, subject, answer)
            else:
                self.events.append(Event(kind, subject, answer))
        return True

    def _ask(self, kind: str, subject: Any) -> Any:
        answer = self._answer(kind, subject)
        self.events.append(Event(kind, subject, answer))
        return answer

    def _answer(self, kind: str, subject: Any) -> Any:
        if kind == "allows":
            return subject in self.rewrites
        return (self.inputs if kind == "input" else self.states).get(subject)

    def _do(self, kind: str, subject: Any, answer: Any) -> None:
        if kind == "write":
            self.states[subject] = answer
        else:
            self.left_out[subject] = None
        self.events.append(Event(kind, subject, answer))
