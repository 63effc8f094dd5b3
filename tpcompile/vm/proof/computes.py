"""Proof that a program computes the values of its graph.

The program runs over terms instead of numbers, in the order of its instructions; the proof of the
order says that every other order gives the same. Consecutive instructions with the same shared
operands make one value together, so their meaning is evaluated once. Each tile that is missing, and
each value that differs from that of the graph, is a fault.

The proof trusts the meanings, each of which is tested with numbers, and the names of weights'
buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from torch import fx

from tpcompile.alike import texts_of_runs
from tpcompile.pause import paused_collector
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.proof.expected import Expected
from tpcompile.vm.proof.fault import Fault, cited, listed
from tpcompile.vm.proof.running import (
    ComputedValue,
    Run,
    Running,
    UnfinishedError,
    WrongError,
    frame_of,
    runs_of,
)
from tpcompile.vm.proof.terms import Difference, Term, Terms, is_mistaken, unlike


@dataclass(frozen=True)
class Computed:
    """The result of a proof about the values of a program."""

    faults: tuple[Fault, ...] = ()
    unproved: tuple[str, ...] = ()
    """The kinds of instructions without a meaning, which prevent a proof."""
    was_checked: bool = True
    """False if the program has other faults, which come first."""

    @property
    def proved(self) -> bool:
        """Whether the program computes its graph."""
        return self.was_checked and not self.faults and not self.unproved

    @property
    def summary(self) -> str:
        """The result in a few words."""
        if self.unproved:
            kinds = ", ".join(self.unproved)
            return f"not proved, because these instructions have no meaning: {kinds}"
        if not self.was_checked:
            return "not checked"
        return "NO" if self.faults else "yes, proved"


NOT_CHECKED = Computed(was_checked=False)


@paused_collector()
def check_values(gm: fx.GraphModule, program: Program) -> Computed:
    """Check that a program, which has no other faults, computes the values of a graph."""
    kinds = {type(instruction): instruction.name for instruction in program.instructions}
    unproved = sorted({name for kind, name in kinds.items() if not has_meaning(kind)})
    if unproved:
        return Computed(unproved=tuple(unproved))
    try:
        _Check(gm, program).run()
    except WrongError as wrong:
        return Computed((Fault("values", str(wrong)),))
    return Computed()


def has_meaning(kind: type) -> bool:
    """Return whether the `meaning` of a class of instructions describes its own `run`.

    A class that overrides `run` alone has no meaning.
    """
    for base in kind.__mro__:
        if base is StepInstruction:
            return False
        if "meaning" in vars(base):
            return True
        if "run" in vars(base):
            return False
    return False


class _Check:
    """The values of a program, instruction by instruction."""

    def __init__(self, gm: fx.GraphModule, program: Program) -> None:
        self._program, self._terms = program, Terms()
        self._expected = Expected(gm, self._terms)
        self._count = len(self._terms)
        """The number of terms of the graph, which are those with lower numbers."""
        self._running = Running(program, self._terms, self._expected)

    def run(self) -> None:
        if self._program.ranks != self._expected.ranks:
            raise WrongError(
                f"the program has {self._program.ranks} ranks, and the graph {self._expected.ranks}"
            )
        for buffer in self._program.buffers:
            wanted = self._expected.misfit(buffer)
            if wanted:
                raise WrongError(
                    f"the {buffer.role.word} buffer {buffer.name} of rank {buffer.rank} must be "
                    f"{wanted}, got {buffer}"
                )
        try:
            for start, run in runs_of(self._program.instructions):
                Run(self._running, start, run).evaluate()
        except UnfinishedError as unfinished:
            raise WrongError(self._first_strange() or str(unfinished)) from None
        self._check_outputs()

    def _check_outputs(self) -> None:
        if not self._expected.outputs:
            raise WrongError("the graph has no argmax; a decode step must choose tokens")
        for rank, role, part, value, description in self._expected.outputs:
            if role not in self._program.roles:
                raise WrongError(f"the program has no {role.word} buffer for {description}")
            number = self._program.one_per_rank(role)[rank]
            buffer = self._program.buffers[number]
            held = self._running.contents.at(number, frame_of(buffer.shape, part))
            where = f"{description} on rank {rank}"
            if held is None:
                raise WrongError(f"no instruction makes {where}, which must be in {buffer.name}")
            if held.value is not value:
                raise WrongError(self._differs(where, value, held.value))
            if held.missing:
                raise WrongError(f"{listed(buffer.name, held.missing)} lacks a part of {where}")

    def _differs(self, where: str, wanted: Term, got: Term) -> str:
        difference = Difference(wanted, got, self._expected.names)
        return self._first_strange() or f"{where} {difference}"

    def _first_strange(self) -> str:
        """Describe the first value that the graph does not have, or return an empty string."""
        strange = [entry for entry in self._running.values if not self._is_known(entry.value)]
        if not strange:
            return ""
        first, names = strange[0], self._expected.names
        value = self._without_parts(first.value)
        message = f"{cited(self._program, first.number)} makes a value that the graph does not have"
        near = self._nearest(value)
        if near is None:
            return f"{message}: {value}"
        name = names.get(near, "the nearest value of the graph")
        difference = Difference(near, value, names)
        return f"{message}; in the graph, {name} {difference}{self._layers(strange)}"

    def _layers(self, strange: Sequence[ComputedValue]) -> str:
        """Name the layers in which instructions of the first kind have a mistake of their own."""
        layers: set[int] = set()
        inherited: set[Term] = set()
        kind: Any = self._program.instructions[strange[0].number]
        for entry in strange:
            instruction: Any = self._program.instructions[entry.number]
            value = self._without_parts(entry.value)
            if type(instruction) is type(kind) and self._is_mistaken(value, inherited):
                layers.add(instruction.layer)
            inherited |= {entry.value, value}
        numbers = ", ".join(texts_of_runs(layers, " to "))
        return f". This mistake is in layers {numbers}" if len(layers) > 1 else ""

    def _is_mistaken(self, value: Term, inherited: AbstractSet[Term]) -> bool:
        near = self._nearest(value)
        return near is None or is_mistaken(near, value, inherited - {value})

    def _is_known(self, value: Term) -> bool:
        return self._without_parts(value).number < self._count

    def _without_parts(self, value: Term) -> Term:
        """Return the whole value that a part belongs to."""
        if value.name == "linear of columns":
            x, weight = value.operands
            return self._terms.linear(x, weight, None)
        if value.name in ("flat", "best of rows", "its row"):
            return self._without_parts(next(value.operands))
        return value

    def _nearest(self, value: Term) -> Term | None:
        """Return the term of the graph that differs from a value in the fewest operands."""
        alike = (
            term
            for term in self._terms
            if term.number < self._count
            and (term.name, len(term.args)) == (value.name, len(value.args))
        )
        return min(alike, key=lambda term: unlike(term, value), default=None)
