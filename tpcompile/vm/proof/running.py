"""Instructions that make values together, run over terms.

Consecutive instructions with the same shared operands have one meaning, which is evaluated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any

import torch

from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.values.node import is_exact
from tpcompile.vm.program import Box, Buffer, Program, Role
from tpcompile.vm.program.buffer import LINEAR_STATES
from tpcompile.vm.program.fields import operands_of
from tpcompile.vm.program.instruction import NONE
from tpcompile.vm.program.meaning import Part, Result
from tpcompile.vm.program.program import joined
from tpcompile.vm.program.region import box_text
from tpcompile.vm.proof.contents import Contents, Stored, disjoint
from tpcompile.vm.proof.expected import Expected
from tpcompile.vm.proof.fault import cited, listed
from tpcompile.vm.proof.opened import Opened
from tpcompile.vm.proof.terms import Term, Terms


class WrongError(Exception):
    """A reason why a program does not compute its graph."""


class UnfinishedError(WrongError):
    """A value that is read before all of it is stored."""


@dataclass(frozen=True)
class ComputedValue:
    """A value that instructions made, for messages."""

    number: int
    value: Term


@dataclass(frozen=True)
class Running:
    """A program that runs over terms, and the contents of its buffers."""

    program: Program
    terms: Terms
    expected: Expected
    contents: Contents = field(default_factory=Contents)
    values: list[ComputedValue] = field(default_factory=list)


def frame_of(shape: Sequence[int], part: Sequence[Part]) -> Box:
    """Return the part of a buffer as a box."""
    frame: list[tuple[int, int]] = []
    for dim, extent in enumerate(shape):
        index = part[dim] if dim < len(part) else None
        if index is None:
            frame.append((0, extent))
        elif isinstance(index, int):
            frame.append((index, index + 1))
        else:
            frame.append((index[0], index[1]))
    return tuple(frame)


_Instructions = Sequence[Any]


def runs_of(instructions: _Instructions) -> Iterator[tuple[int, list[Any]]]:
    """Yield consecutive instructions whose material shared operands are the same."""
    start, last = 0, None
    run: list[Any] = []
    for number, instruction in enumerate(instructions):
        if (
            run
            and type(instruction) is type(run[0])
            and (instruction.at is last or _same_operands(instruction, run[0]))
        ):
            run.append(instruction)
        else:
            if run:
                yield start, run
            start, run = number, [instruction]
        last = instruction.at
    if run:
        yield start, run


def groups_of(start: int, run: _Instructions) -> list[tuple[int, list[Any]]]:
    """Return the instructions of a run by the operands of their own on which values depend."""
    apart = type(run[0]).apart
    if not apart:
        return [(start, list(run))]
    groups: dict[Any, tuple[int, list[Any]]] = {}
    getter = attrgetter(*apart)
    for number, instruction in enumerate(run, start):
        groups.setdefault(getter(instruction), (number, []))[1].append(instruction)
    return list(groups.values())


def heads_of(run: _Instructions) -> tuple[int, ...]:
    """Return the head that each reader reads. Raise ValueError if it is not exactly one."""
    head, readers = type(run[0]).reads_head
    read: dict[int, int] = {}
    for instruction in run:
        for reader in range(*getattr(instruction, readers)):
            other = read.setdefault(reader, getattr(instruction, head))
            if other != getattr(instruction, head):
                heads = f"heads {other} and {getattr(instruction, head)}"
                raise ValueError(f"read {heads} for head {reader}, which must read only one")
    if sorted(read) != list(range(len(read))):
        missing = min(set(range(max(read))) - set(read))
        raise ValueError(f"leave out head {missing}")
    return tuple(read[reader] for reader in sorted(read))


def _same_operands(instruction: Any, other: Any) -> bool:
    kind: Any = type(instruction)
    return bool(_material(kind)(instruction.at) == _material(kind)(other.at))


@cache
def _material(kind: Any) -> Any:
    """Return the getter of the shared operands that values depend on."""
    names = [f.name for f in fields(operands_of(kind)) if f.name not in kind.immaterial]
    return attrgetter(*names)


class Run:
    """Consecutive instructions that make values together, and the values that they read."""

    def __init__(self, running: Running, start: int, run: list[Any]) -> None:
        self._running, self._start, self._instructions = running, start, run
        self._instruction, self._operands = run[0], run[0].at
        self._opened = Opened(running.terms)
        self._read: set[tuple[int, str]] = set()
        """The buffers that meanings read, with their operands."""
        self._stored_in: dict[Term, Buffer] = {}
        """The buffers of values that instructions have stored, and meanings read."""

    def evaluate(self) -> None:
        """Evaluate the meaning, and store the tiles of the values that it makes."""
        outputs: list[tuple[Result, list[Any], int]] = []
        for number, group in groups_of(self._start, self._instructions):
            self._instruction = group[0]
            outputs += [(output, group, number) for output in self._instruction.meaning(self)]
        written = {self._number(output.operand): output.operand for output, *_ in outputs}
        spoilt = self._spoilt(set(written))
        for number, operand in self._read:
            if number in spoilt or written.get(number, operand) != operand:
                raise WrongError(
                    f"{self._cited(self._start)} and later instructions read {operand} from "
                    f"{self._running.program.buffers[number].name}, which they also write"
                )
            if number in written:
                self._verify_in_place(number)
        for output, group, first in outputs:
            self._store(output, group, first)

    def _spoilt(self, written: set[int]) -> set[int]:
        """Forget values in the other buffers that the instructions write; return these buffers."""
        spoilt: set[int] = set()
        for instruction in self._instructions:
            for buffer, box in (*instruction.writes, *joined(instruction)):
                if buffer not in written:
                    spoilt.add(buffer)
                    self._running.contents.spoil(buffer, box)
        return spoilt

    def _store(self, output: Result, group: list[Any], first: int) -> None:
        number, value = self._number(output.operand), output.value.kind
        buffer = self._running.program.buffers[number]
        frame = frame_of(buffer.shape, output.part)
        tiles, whole = _tiles(group, number)
        if buffer.role == Role.SCRATCH and not _fits(value, frame):
            raise WrongError(
                f"{self._cited(first)} makes {value} of shape {value.shape}, but stores it in "
                f"{buffer.name}{box_text(frame)}"
            )
        self._running.values.append(ComputedValue(first, value))
        self._running.contents.store(number, frame, Stored(value, (*frame, *whole), tiles))

    def _verify_in_place(self, number: int) -> None:
        """Check that instructions change each part of a state once, and row by row."""
        done: set[Box] = set()
        tiles: list[Box] = []
        for place, instruction in enumerate(self._instructions, self._start):
            reads = {box for buffer, box in instruction.reads if buffer == number}
            writes = [box for buffer, box in instruction.writes if buffer == number]
            buffer = self._running.program.buffers[number]
            for box in reads.difference(writes):
                if buffer.role not in LINEAR_STATES or not _resumes(box, writes, done):
                    raise WrongError(
                        f"{self._cited(place)} reads {buffer.name}{box_text(box)}, but not all of "
                        "the rows before its own have been stored"
                    )
            done.update(writes)
            tiles += writes
        if not disjoint(tiles):
            name = self._running.program.buffers[number].name
            raise WrongError(
                f"{self._cited(self._start)} and the instructions after it must change each part "
                f"of {name} exactly once"
            )

    def _cited(self, number: int) -> str:
        return cited(self._running.program, number)

    def _number(self, operand: str) -> int:
        own_number = vars(self._instruction).get(operand)
        number: int = attrgetter(operand)(self._operands) if own_number is None else own_number
        return number

    # Implementation of `Values` for meanings

    @property
    def heads(self) -> Sequence[int]:
        """The head that each reader reads."""
        try:
            return heads_of(self._instructions)
        except ValueError as wrong:
            raise WrongError(f"{self._cited(self._start)} and later instructions {wrong}") from None

    def shape(self, operand: str) -> tuple[int, ...]:
        return self._running.program.buffers[self._number(operand)].shape

    def input(self, name: str) -> Any:
        return self._opened.operand(self._running.expected.input(name))

    def new(self, operand: str) -> Any:
        return self._opened.operand(self._opened.stored[operand, self._operands.layer])

    def call(self, name: str, *operands: Any) -> Any:
        args = [getattr(operand, "kind", operand) for operand in operands]
        terms = self._running.terms
        special: dict[str, Callable[..., Term]] = {
            "sum": self._total,
            "linear of columns": terms.linear_of_columns,
            "greatest": terms.greatest,
            "gated experts": terms.gated_experts,
            "sum of experts": terms.sum_of_experts,
            "best of rows": terms.best_of_rows,
            "its row": terms.its_row,
        }
        term = special[name](*args) if name in special else terms.call(name, *args)
        return self._opened.operand(term)

    def _total(self, *addends: Term) -> Term:
        """Return a sum, and check that its terms are not rounded before they are added."""
        for addend in addends:
            buffer = self._stored_in.get(addend)
            if buffer is not None and not is_exact(torch.float32, buffer.dtype):
                raise WrongError(
                    f"{self._cited(self._start)} adds terms that {buffer.name} of rank "
                    f"{buffer.rank} stores in {dtype_name(buffer.dtype)}; terms of a sum must be "
                    "stored in f32, so that only the sum is rounded"
                )
        return self._running.terms.total(*addends)

    def __getitem__(self, operand: str) -> Any:
        if self._number(operand) == NONE:
            return None
        return self.part(operand)

    def part(self, operand: str, *part: Part, rank: int | None = None) -> Any:
        number = self._number(operand) + (rank or 0)
        self._read.add((number, operand))
        return self._opened.operand(self._value(number, operand, part))

    def _value(self, number: int, operand: str, part: tuple[Part, ...]) -> Term:
        running = self._running
        buffer = running.program.buffers[number]
        if buffer.role == Role.WEIGHT:
            weight = running.expected.parameter(buffer.name, buffer.rank)
            assert weight is not None, "its buffer was checked"
            return weight
        frame = frame_of(buffer.shape, part)
        held = running.contents.at(number, frame)
        if held is None and not running.contents.touched(number, frame):
            if buffer.role.kind == "scratch":
                raise WrongError(
                    f"{self._cited(self._start)} reads {operand} from {buffer.name}"
                    f"{box_text(frame)}, but no instruction stores a value there as a whole"
                )
            return self._before(number, part)
        if held is None or held.missing:
            missing = [frame] if held is None else held.missing
            value = "" if held is None else f" of {self._named(held.value)}"
            raise UnfinishedError(
                f"{self._cited(self._start)} reads {operand} from {buffer.name}, but no "
                f"instruction before it stores {listed(buffer.name, missing)}{value}"
            )
        self._stored_in[held.value] = buffer
        return held.value

    def _named(self, value: Term) -> str:
        return self._running.expected.names.get(value, str(value))

    def _before(self, number: int, part: tuple[Part, ...]) -> Term:
        """Return the contents of a buffer before the step."""
        running = self._running
        buffer = running.program.buffers[number]
        name = buffer.role.word
        if buffer.role in (Role.COS, Role.SIN):
            return running.expected.table(name, buffer.shape[1], buffer.dtype)
        if buffer.role in LINEAR_STATES:
            return running.expected.layer_of(name, part[0], buffer.rank)
        return running.expected.input(name)


def _resumes(box: Box, writes: Sequence[Box], done: set[Box]) -> bool:
    """Return whether states are those of earlier rows, already written, and the row's own."""
    layer, (first, stop), *inner = box
    rows = [(layer, (row, row + 1), *inner) for row in range(first, stop)]
    return rows[-1] in writes and all(row in done for row in rows[:-1])


def _fits(value: Term, frame: Box) -> bool:
    """Return whether a value has as many elements per row as a frame."""
    return prod(value.shape[1:]) == prod(stop - start for start, stop in frame[1:])


def _tiles(group: Sequence[Any], number: int) -> tuple[list[Box], tuple[tuple[int, int], ...]]:
    """Return the tiles of instructions in a buffer, and the rows of a head if they are blocks."""
    if not group[0].joins:
        return [
            box for instruction in group for buffer, box in instruction.writes if buffer == number
        ], ()
    joins = [
        join for instruction in group for join in instruction.joins if join.region.buffer == number
    ]
    return [(*join.region.box, join.part) for join in joins], ((0, joins[0].whole),)
