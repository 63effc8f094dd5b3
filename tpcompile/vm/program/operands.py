"""The check that instructions agree with the buffers that they use.

The regions that an instruction reads and writes follow from its operands, and all proofs depend on
these regions. So operands must agree with the shapes, dtypes and roles of buffers; then an
instruction touches exactly its regions. The rules are declared with each operand. The verifier, the
decoder of words, the parser of text and the reference machine all use this check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from tpcompile.errors import CompileError, UnsupportedError, VerifyError
from tpcompile.vm.program.agreement import Agreement, Buffers, OperandProblem
from tpcompile.vm.program.buffer import wrong_buffers
from tpcompile.vm.program.fields import field_rules
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.program.program import Program
from tpcompile.vm.program.rules import BufferRule, Number, Within
from tpcompile.vm.targets import INT32_MAX

NOT_IN_AGREEMENT = "An operand does not agree with the program's buffers"
WRONG_BUFFER = "A buffer of the program is not valid"


@dataclass(frozen=True)
class Disagreement:
    """A problem with an operand of an instruction."""

    number: int
    problem: OperandProblem
    shared: bool
    """Whether it is in the shared operands. Only the first instruction that has them is named."""


def disagreements(program: Program) -> Iterator[Disagreement]:
    """Yield every problem with operands. Abstract instructions have no operands to check."""
    buffers = Buffers.of(program.buffers, program.ranks)
    known: dict[tuple[int, type], _OwnOperands | None] = {}
    good: dict[object, set[object]] = {}
    """The own operands known to be valid, by the kind of instruction and their limits."""
    last: tuple[object, object] = None, None
    own_operands: _OwnOperands | None = None
    for number, instruction in enumerate(program.instructions):
        if not isinstance(instruction, StepInstruction):
            continue
        operands, kind = instruction.at, type(instruction)
        if operands is not last[0] or kind is not last[1]:
            last, key = (operands, kind), (id(operands), kind)
            if key not in known:
                shared = Agreement(buffers, kind, operands)
                yield from (Disagreement(number, problem, True) for problem in shared.problems)
                known[key] = None if shared.broken else _OwnOperands(kind, shared, good)
            own_operands = known[key]
        if own_operands is not None and not own_operands.within(instruction):
            yield from (
                Disagreement(number, problem, False)
                for problem in own_operands.problems(instruction)
            )


def verify_operands(program: Program, error: type[CompileError] = VerifyError) -> None:
    """Raise an error for the first wrong buffer, or operand that does not agree with buffers."""
    for wrong in wrong_buffers(program.buffers, program.ranks):
        raise error(WRONG_BUFFER, where=wrong.subject, got=wrong.got, expected=wrong.expected)
    for disagreement in disagreements(program):
        number, problem = disagreement.number, disagreement.problem
        raise error(
            NOT_IN_AGREEMENT,
            where=f"{program.instructions[number].label} (instruction {number})",
            got=f"{problem.operand} = {problem.got}",
            expected=problem.expected,
        )


def _is_range(rule: Any) -> bool:
    return isinstance(rule, Number) and rule == Number(rule.least, rule.most)


class _OwnOperands:
    """The limits of each instruction's own operands, given its shared operands."""

    def __init__(self, kind: Any, shared: Agreement, good: dict[object, set[object]]) -> None:
        self._shared = shared
        rules = {name: rule for name, rule in field_rules(kind).items() if name != "at"}
        self._ranges = [
            (name, shared.names.number(rule.extent), rule.least)
            for name, rule in rules.items()
            if type(rule) is Within
        ]
        self._numbers = [
            (name, rule.least, shared.names.number(rule.most) if rule.most else INT32_MAX)
            for name, rule in rules.items()
            if _is_range(rule)
        ]
        self._buffers = [(name, rule) for name, rule in rules.items() if type(rule) is BufferRule]
        checked = {name for name, *_ in (*self._ranges, *self._numbers, *self._buffers)}
        for name in rules.keys() - checked:
            raise UnsupportedError(
                f"The rule of {name} is not supported for an operand that each instruction "
                f"{kind.name} has for itself",
                got=str(rules[name]),
                expected="Within, BufferRule, or Number with only least and most",
                hint="Use another rule, or move the operand to the shared operands `at`",
            )
        self._good: set[tuple[str, int]] = set()
        limited = {name for name, *_ in (*self._ranges, *self._numbers)}
        limited |= {longer for *_, longer in self._ranges if longer}
        # The name is the same for all; attrgetter needs at least one attribute.
        self._limited = attrgetter(*sorted(limited), "name")
        self._within = good.setdefault((kind, *self._ranges, *self._numbers), set())

    def within(self, instruction: StepInstruction) -> bool:
        """Return whether all own operands are known to be valid. This is the fast path."""
        limited = self._limited(instruction)
        if limited not in self._within:
            if not self._are_within(vars(instruction)):
                return False
            self._within.add(limited)
        if not self._buffers:
            return True
        values = vars(instruction)
        return all((name, values[name]) in self._good for name, _ in self._buffers)

    def _are_within(self, values: Mapping[str, Any]) -> bool:
        for name, extent, longer in self._ranges:
            start, stop = values[name]
            if not 0 <= start < stop <= extent or (longer and stop - start < values[longer]):
                return False
        return all(least <= values[name] <= most for name, least, most in self._numbers)

    def problems(self, instruction: StepInstruction) -> Iterator[OperandProblem]:
        """Yield the problems of own operands, and remember the buffers that are valid."""
        values: dict[str, Any] = vars(instruction)
        for name, extent, longer in self._ranges:
            start, stop = values[name]
            shortest = values[longer] if longer else 1
            if not 0 <= start < stop <= extent or stop - start < shortest:
                expected = f"a range of length {shortest} or more within 0:{extent}"
                yield OperandProblem(name, f"{start}:{stop}", expected)
        for name, least, most in self._numbers:
            if not least <= values[name] <= most:
                yield OperandProblem(name, str(values[name]), f"a number from {least} to {most}")
        for name, rule in self._buffers:
            before = len(self._shared.problems)
            self._shared.check_own(name, values[name], rule)
            new = self._shared.problems[before:]
            yield from new
            if not new:
                self._good.add((name, values[name]))
