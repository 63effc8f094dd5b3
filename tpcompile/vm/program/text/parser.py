"""The parser of a program's text. Its errors name the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from tpcompile.errors import UsageError
from tpcompile.ir.dtypes import DTYPES
from tpcompile.ir.format import Format
from tpcompile.vm.program.buffer import Buffer, wrong_buffers
from tpcompile.vm.program.fields import field_types, operands_of, own_types
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.program.instruction_set import INSTRUCTIONS
from tpcompile.vm.program.operands import NOT_IN_AGREEMENT, WRONG_BUFFER, disagreements
from tpcompile.vm.program.program import Program, Wait
from tpcompile.vm.program.text.line import Line, lines_of
from tpcompile.vm.program.text.values import (
    ROLES,
    SECTIONS,
    named,
    operand_kinds,
    operand_types,
    operands_name,
    run_of,
    shaped,
    whole,
)

_BEGINS = "a line that begins with the word program"
_SHOWN = 60
"""The maximum number of characters of a wrong first line in an error."""


def parse_program(text: str, check: bool = True) -> Program:
    """Parse a program from its text form.

    Raise a UsageError if operands do not agree with the buffers. `check=False` turns this check
    off, to inspect a broken program. The verifier, not the parser, checks the execution order.
    """
    if not isinstance(text, str):
        raise UsageError(
            "parse_program takes the text of a program",
            got=f"a value of type {type(text).__name__}",
            expected="a str",
        )
    head: Line | None = None
    sections: dict[str, list[Line]] = {}
    for line in lines_of(text):
        if head is None:
            head = _headed(line)
        elif len(line.words) == 1 and line.words[0] == _next_section(sections):
            sections[line.words[0]] = []
        elif not sections:
            raise line.refusal("A section must begin here", got=line.words[0], expected=SECTIONS[0])
        else:
            sections[next(reversed(sections))].append(line)
    if head is None:
        raise UsageError("The text of a program is empty", expected=_BEGINS)
    missing = _next_section(sections)
    if missing:
        raise UsageError(
            f"The text of the program ends before the section {missing}",
            where=f"line {text.count(chr(10)) + 1}",
            expected=f"the sections {', '.join(SECTIONS)}",
        )
    return _Parser(head, sections).program(check)


def _headed(line: Line) -> Line:
    """Check that the first line begins a program, and return it."""
    if line.words[0] != "program":
        text = " ".join(line.words)
        begins = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
        raise line.refusal("This is not the text of a program", got=repr(begins), expected=_BEGINS)
    return line


def _next_section(sections: Mapping[str, object]) -> str:
    return SECTIONS[len(sections)] if len(sections) < len(SECTIONS) else ""


class _Parser:
    """A parser of the sections in order. Equal operands become one object."""

    def __init__(self, head: Line, sections: Mapping[str, list[Line]]) -> None:
        self._head, self._sections = head, sections
        self._shared: dict[Any, Any] = {}
        self._operands: list[Any] = []
        self._waits: list[tuple[Wait, ...]] = []
        self._signals: list[tuple[int, ...]] = []

    def program(self, check: bool) -> Program:
        name, values = self._header()
        self._ranks, self._counters = values["ranks"], values.pop("counters")
        buffers = tuple(map(self._buffer, self._numbered("buffers", "b")))
        self._operands = [self._operand(line) for line in self._numbered("operands", "a")]
        lines = list(self._numbered("instructions", "i"))
        instructions = tuple(map(self._instruction, lines))
        queues = self._queues(lines)
        waits, signals = tuple(self._waits), tuple(self._signals)
        program = Program(buffers, instructions, queues, waits, signals, name=name, **values)
        if program.counters != self._counters:
            raise self._head.refusal(
                "Counters are missing",
                got=f"{program.counters} in use",
                expected=f"{self._counters}, as in this line",
            )
        if check:
            self._check_operands(program, lines)
        return program

    def _check_operands(self, program: Program, lines: Sequence[Line]) -> None:
        for bad in wrong_buffers(program.buffers, program.ranks):
            line = self._sections["buffers"][bad.number]
            raise line.refusal(WRONG_BUFFER, f"{bad.subject} = {bad.got}", bad.expected)
        for disagreement in disagreements(program):
            line, problem = lines[disagreement.number], disagreement.problem
            if disagreement.shared:
                line = self._sections["operands"][line.reference(line.words[2], "a", "operands")]
            got = f"{problem.operand} = {problem.got}"
            raise line.refusal(NOT_IN_AGREEMENT, got, problem.expected)

    def _header(self) -> tuple[str, dict[str, Any]]:
        line = self._head
        types = {"ranks": int, "sharing": int, "repeats": bool, "counters": int}
        values = line.values(line.words[2:], types)
        for name, least in (("ranks", 1), ("sharing", 1), ("counters", 0)):
            if values[name] < least:
                raise line.refusal(f"{name} must be at least {least}", got=f"{name}={values[name]}")
        return line.read("name", line.word(1, "name"), named), values

    def _numbered(self, section: str, letter: str) -> Iterator[Line]:
        """Yield the lines of a section and check their numbers."""
        for number, line in enumerate(self._sections[section]):
            line.begin(letter, number, section.removesuffix("s"))
            yield line

    def _buffer(self, line: Line) -> Buffer:
        name = line.read("name", line.word(1, "name"), named)
        words: dict[str, str] = {}
        for word in line.words[2:]:
            key, _, value = word.partition("=")
            line.known("buffer field", key, _BUFFER)
            if key in words:
                raise line.refusal(f"The field {key} is given twice", got=word)
            words[key] = value
        missing = [key for key in _BUFFER if key not in words and key not in _OPTIONAL]
        if missing:
            raise line.refusal("Buffer fields are missing", expected=", ".join(missing))
        rank = line.read("rank", words["rank"], whole)
        self._check_rank(line, rank)

        def optional(field: str, parse: Callable[[str], Any]) -> Any:
            return line.read(field, words[field], parse) if field in words else None

        return Buffer(
            name=name,
            shape=line.read("shape", words["shape"], shaped),
            dtype=line.known("dtype", words["dtype"], DTYPES),
            rank=rank,
            role=line.known("buffer role", words["role"], ROLES),
            storage=optional("storage", shaped),
            format=optional("format", Format.parsed),
            first=optional("first", whole) or 0,
        )

    def _check_rank(self, line: Line, rank: int) -> None:
        if not 0 <= rank < self._ranks:
            raise line.refusal(
                f"There is no rank {rank}", expected=f"a rank from 0 to {self._ranks - 1}"
            )

    def _operand(self, line: Line) -> Any:
        kind = line.known("operand kind", line.word(1, "operand kind"), operand_kinds())
        values = line.values(line.words[2:], operand_types(kind))
        self._check_rank(line, values["rank"])
        return self._built(kind, values)

    def _built(self, kind: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
        fields = {}
        for name, inner in field_types(kind):
            path = prefix + name
            nested = is_dataclass(inner)
            fields[name] = self._built(inner, values, f"{path}.") if nested else values[path]
        operands = kind(**fields)
        return self._shared.setdefault(operands, operands)

    def _instruction(self, line: Line) -> StepInstruction:
        name = line.word(1, "instruction name")
        kind: Any = line.known("instruction", name, INSTRUCTIONS)
        operands = self._shared_operands(line, kind)
        operand_words, waits, signals = _divided(line)
        values = line.values(operand_words, own_types(kind))
        self._waits.append(tuple(self._wait(line, word) for word in waits))
        self._signals.append(tuple(self._counter(line, word) for word in signals))
        instruction: StepInstruction = kind(operands, **values)
        return instruction

    def _shared_operands(self, line: Line, kind: type[StepInstruction]) -> Any:
        word = line.word(2, "operands")
        number = line.reference(word, "a", "operands")
        if number >= len(self._operands):
            raise line.refusal(
                f"There are no operands {word}",
                expected=f"one of the {len(self._operands)} operands from a0",
            )
        operands = self._operands[number]
        if type(operands) is not operands_of(kind):
            raise line.refusal(
                f"The operands {word} have the wrong kind",
                got=operands_name(type(operands)),
                expected=f"{operands_name(operands_of(kind))} for the instruction {kind.name}",
            )
        return operands

    def _wait(self, line: Line, word: str) -> Wait:
        counter, separator, until = word.partition(">=")
        if not separator:
            raise line.refusal(
                "The wait is not valid", got=repr(word), expected="a wait such as c0>=4"
            )
        return Wait(self._counter(line, counter), line.read("wait", until, whole))

    def _counter(self, line: Line, word: str) -> int:
        number = line.reference(word, "c", "counter")
        if number >= self._counters:
            raise line.refusal(
                f"There is no counter {word}",
                expected=f"one of the {self._counters} counters from c0",
            )
        return number

    def _queues(self, instructions: Sequence[Line]) -> tuple[tuple[int, ...], ...]:
        """Read the queues and check that each instruction is in exactly one."""
        queues: list[tuple[int, ...]] = []
        placed = [False] * len(instructions)
        for line in self._numbered("queues", "w"):
            queues.append(tuple(_placed(line, placed)))
        if not all(placed):
            number = placed.index(False)
            raise instructions[number].refusal(
                f"The instruction i{number} is in no queue",
                expected="each instruction in one queue",
            )
        if len(queues) % self._ranks:
            raise self._head.refusal(
                f"{len(queues)} queues do not divide evenly among {self._ranks} ranks",
                expected="the same number of queues for each rank",
            )
        return tuple(queues)


_OPTIONAL = ("storage", "format", "first")
_BUFFER = {name: name for name in ("rank", "role", "dtype", "shape", *_OPTIONAL)}


def _placed(line: Line, placed: list[bool]) -> Iterator[int]:
    """Yield the instructions of a queue and mark them as placed."""
    for word in line.words[1:]:
        run = line.read("instructions of a queue", word, run_of)
        if not run or not (min(run[0], run[-1]) >= 0 and max(run[0], run[-1]) < len(placed)):
            raise line.refusal(
                "A queue names instructions that do not exist",
                got=word,
                expected=f"numbers of the {len(placed)} instructions from 0",
            )
        for number in run:
            if placed[number]:
                raise line.refusal(f"The instruction i{number} is in the queues twice", got=word)
            placed[number] = True
            yield number


def _divided(line: Line) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Split the words of an instruction into operands, waits and signals."""
    words = line.words[3:]
    signal = words.index("signal") if "signal" in words else len(words)
    wait = words.index("wait") if "wait" in words[:signal] else signal
    for name, place in (("wait", wait), ("signal", signal)):
        if place < len(words) and words[place : place + 2] in ([name], [name, "signal"]):
            raise line.refusal(f"No counter follows {name!r}", expected=f"{name} c0 …")
    return words[:wait], words[wait + 1 : signal], words[signal + 1 :]
