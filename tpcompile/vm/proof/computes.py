"""Proof that a program computes the values of its graph.

The program runs over terms instead of numbers, in the order of its instructions; the proof of the
order says that every other order gives the same. Consecutive instructions with the same shared
operands make one value together, so their meaning is evaluated once. Each tile that is missing, and
each value that differs from that of the graph, is a fault.

Trusted are the meanings, of which tests put each to numbers, and the names of weights' buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any

from torch import fx

from tpcompile.pause import paused_collector
from tpcompile.vm.program import Box, Program, Role
from tpcompile.vm.program.fields import operands_of
from tpcompile.vm.program.instruction import NONE, StepInstruction
from tpcompile.vm.program.meaning import Made, Part
from tpcompile.vm.program.region import box_text
from tpcompile.vm.proof.contents import Contents, Stored, disjoint
from tpcompile.vm.proof.expected import Expected
from tpcompile.vm.proof.fault import Fault, cited
from tpcompile.vm.proof.opened import Opened
from tpcompile.vm.proof.terms import Difference, Term, Terms, unlike


@dataclass(frozen=True)
class Computed:
    """What a proof found about the values of a program."""

    faults: tuple[Fault, ...] = ()
    unproved: tuple[str, ...] = ()
    """The kinds of instructions without a meaning, because of which nothing is proved."""
    was_checked: bool = True
    """False if the program has other faults, which come first."""

    @property
    def proved(self) -> bool:
        """Whether the program computes its graph."""
        return self.was_checked and not self.faults and not self.unproved

    @property
    def said(self) -> str:
        """The result in a few words."""
        if self.unproved:
            kinds = ", ".join(self.unproved)
            return f"not proved, because these instructions have no meaning: {kinds}"
        if not self.was_checked:
            return "not checked"
        return "NO" if self.faults else "yes, proved"


NOT_CHECKED = Computed(was_checked=False)


class _WrongError(Exception):
    """A reason why a program does not compute its graph."""


class _UnfinishedError(_WrongError):
    """A value that is read before all of it is stored."""


@paused_collector()
def check_values(gm: fx.GraphModule, program: Program) -> Computed:
    """Check that a program, which has no other faults, computes the values of a graph."""
    kinds = {type(one): one.name for one in program.instructions}
    unproved = sorted({name for kind, name in kinds.items() if not has_meaning(kind)})
    if unproved:
        return Computed(unproved=tuple(unproved))
    try:
        _Check(gm, program).run()
    except _WrongError as wrong:
        return Computed((Fault("values", str(wrong)),))
    return Computed()


def has_meaning(kind: type) -> bool:
    """Return whether a class of instructions says what its own `run` computes."""
    for each in kind.__mro__:
        if each is StepInstruction:
            return False
        if "meaning" in vars(each):
            return True
        if "run" in vars(each):
            return False
    return False


@dataclass(frozen=True)
class _Made:
    """A value that instructions made, for messages."""

    number: int
    operand: str
    value: Term


class _Check:
    """The values of a program, instruction by instruction."""

    def __init__(self, gm: fx.GraphModule, program: Program) -> None:
        self.program = program
        self.terms = Terms()
        self.expected = Expected(gm, self.terms)
        self.count = len(self.terms)
        """The number of terms of the graph, which are those with lower numbers."""
        self.contents = Contents()
        self.made: list[_Made] = []

    def run(self) -> None:
        if self.program.ranks != self.expected.ranks:
            raise _WrongError(
                f"the program has {self.program.ranks} ranks, and the graph {self.expected.ranks}"
            )
        for buffer in self.program.buffers:
            wanted = self.expected.misfit(buffer)
            if wanted:
                raise _WrongError(
                    f"the {buffer.role.word} buffer {buffer.name} of rank {buffer.rank} must be "
                    f"{wanted}, got {buffer}"
                )
        try:
            for start, own in runs_of(self.program.instructions):
                _Run(self, start, own).evaluate()
        except _UnfinishedError as unfinished:
            raise _WrongError(self.first_strange() or str(unfinished)) from None
        self._check_outputs()

    def _check_outputs(self) -> None:
        outputs = self.expected.outputs()
        if not outputs:
            raise _WrongError("the graph chooses no tokens, as a decode step must")
        for rank, role, part, value, said in outputs:
            if role not in self.program.roles:
                raise _WrongError(f"no buffer {role.word} has {said}")
            number = self.program.one_per_rank(role)[rank]
            buffer = self.program.buffers[number]
            held = self.contents.at(number, frame_of(buffer.shape, part))
            where = f"{said} on rank {rank}"
            if held is None:
                raise _WrongError(f"no instruction makes {where}, which must be in {buffer.name}")
            if held.value is not value:
                raise _WrongError(self._differs(where, value, held.value))
            if held.missing:
                raise _WrongError(f"{_listed(buffer.name, held.missing)} lacks a part of {where}")

    def _differs(self, where: str, wanted: Term, got: Term) -> str:
        difference = Difference(wanted, got).said(self.expected.names)
        return self.first_strange() or f"{where} {difference}"

    def first_strange(self) -> str:
        """Describe the first value that the graph does not have; "" if there is none."""
        made = next((made for made in self.made if not self._is_known(made.value)), None)
        if made is None:
            return ""
        names, value = self.expected.names, self._without_parts(made.value)
        said = f"{cited(self.program, made.number)} makes a value that the graph does not have"
        near = self._nearest(value)
        if near is None:
            return f"{said}: {value}"
        name = names.get(near, "the nearest value of the graph")
        return f"{said}; {name} {Difference(near, value).said(names)}"

    def _is_known(self, value: Term) -> bool:
        return self._without_parts(value).number < self.count

    def _without_parts(self, value: Term) -> Term:
        """Return the whole value that a part belongs to."""
        if value.name == "linear of columns":
            x, weight = value.operands
            return self.terms.linear(x, weight, None)
        if value.name in ("flat", "best of rows", "its row"):
            return self._without_parts(next(value.operands))
        return value

    def _nearest(self, value: Term) -> Term | None:
        """Return the term of the graph that differs from a value in the fewest operands."""
        alike = (
            term
            for term in self.terms
            if term.number < self.count
            and (term.name, len(term.args)) == (value.name, len(value.args))
        )
        return min(alike, key=lambda term: unlike(term, value), default=None)


def frame_of(shape: Sequence[int], part: Sequence[Part]) -> Box:
    """Return the part of a buffer as a box."""
    found: list[tuple[int, int]] = []
    for dim, extent in enumerate(shape):
        own = part[dim] if dim < len(part) else None
        if own is None:
            found.append((0, extent))
        elif isinstance(own, int):
            found.append((own, own + 1))
        else:
            found.append((own[0], own[1]))
    return tuple(found)


def _listed(name: str, pieces: Sequence[Box]) -> str:
    listed = ", ".join(name + box_text(box) for box in pieces[:3])
    return listed + (f" and {len(pieces) - 3} more parts" if len(pieces) > 3 else "")


_Instructions = Sequence[Any]


def runs_of(instructions: _Instructions) -> Iterator[tuple[int, list[Any]]]:
    """Yield consecutive instructions whose material shared operands are the same."""
    start, own, last = 0, [], None
    for number, one in enumerate(instructions):
        if own and type(one) is type(own[0]) and (one.at is last or _same(one, own[0])):
            own.append(one)
        else:
            if own:
                yield start, own
            start, own = number, [one]
        last = one.at
    if own:
        yield start, own


def groups_of(start: int, run: _Instructions) -> list[tuple[int, list[Any]]]:
    """Return the instructions of a run by the operands of their own on which values depend."""
    apart = type(run[0]).apart
    if not apart:
        return [(start, list(run))]
    groups: dict[Any, tuple[int, list[Any]]] = {}
    getter = attrgetter(*apart)
    for number, one in enumerate(run, start):
        groups.setdefault(getter(one), (number, []))[1].append(one)
    return list(groups.values())


def heads_of(run: _Instructions) -> tuple[int, ...]:
    """Return the head that each reader reads. Raise ValueError if it is not exactly one."""
    head, readers = type(run[0]).reads_head
    read: dict[int, int] = {}
    for one in run:
        for reader in range(*getattr(one, readers)):
            other = read.setdefault(reader, getattr(one, head))
            if other != getattr(one, head):
                heads = f"heads {other} and {getattr(one, head)}"
                raise ValueError(f"read {heads} for head {reader}; it must be one of them")
    if sorted(read) != list(range(len(read))):
        missing = min(set(range(max(read))) - set(read))
        raise ValueError(f"leave out head {missing}")
    return tuple(read[reader] for reader in sorted(read))


def _same(one: Any, other: Any) -> bool:
    return bool(_material(type(one))(one.at) == _material(type(one))(other.at))


@cache
def _material(kind: Any) -> Any:
    """Return the getter of the shared operands that values depend on."""
    names = [f.name for f in fields(operands_of(kind)) if f.name not in kind.immaterial]
    return attrgetter(*names)


class _Run:
    """Consecutive instructions that make values together, and the values that they read."""

    def __init__(self, check: _Check, start: int, own: list[Any]) -> None:
        self._check, self._start, self._own = check, start, own
        self._one, self._at = own[0], own[0].at
        self._opened = Opened(check.terms)
        self._read: set[tuple[int, str]] = set()
        """The buffers that meanings read, with their operands."""

    def evaluate(self) -> None:
        """Evaluate the meaning, and store the tiles of the values that it makes."""
        made: list[tuple[Made, list[Any], int]] = []
        for number, own in groups_of(self._start, self._own):
            self._one = own[0]
            made += [(each, own, number) for each in self._one.meaning(self)]
        written = {self._number(each.operand): each.operand for each, *_ in made}
        others = self._spoilt(set(written))
        for number, operand in self._read:
            if number in others or written.get(number, operand) != operand:
                raise _WrongError(
                    f"{self._cited(self._start)} and those after it read {operand} from "
                    f"{self._check.program.buffers[number].name}, which they also write"
                )
            if number in written:
                self._check_in_place(number)
        for each, own, first in made:
            self._store(each, own, first)

    def _spoilt(self, made: set[int]) -> set[int]:
        """Forget the values that instructions overwrite beside what they make.

        Return the buffers.
        """
        others: set[int] = set()
        for one in self._own if self._own[0].joins else self._own[:1]:
            for buffer, box in (*one.writes, *(join.region for join in one.joins)):
                if buffer not in made:
                    others.add(buffer)
                    self._check.contents.spoil(buffer, box)
        return others

    def _store(self, made: Made, own: list[Any], first: int) -> None:
        number, value = self._number(made.operand), made.value.kind
        buffer = self._check.program.buffers[number]
        frame = frame_of(buffer.shape, made.part)
        tiles, whole = _tiles(own, number)
        if buffer.role == Role.SCRATCH and not _fits(value, frame):
            raise _WrongError(
                f"{self._cited(first)} makes {value} of shape {value.shape}, but stores it in "
                f"{buffer.name}{box_text(frame)}"
            )
        self._check.made.append(_Made(first, made.operand, value))
        self._check.contents.store(number, frame, Stored(value, (*frame, *whole), tiles))

    def _check_in_place(self, number: int) -> None:
        """Check that instructions change each part of a state once, and row by row."""
        done: set[Box] = set()
        tiles: list[Box] = []
        for place, one in enumerate(self._own, self._start):
            reads = {box for buffer, box in one.reads if buffer == number}
            writes = [box for buffer, box in one.writes if buffer == number]
            for box in reads.difference(writes):
                if not self._resumes(box, writes, done):
                    buffer = self._check.program.buffers[number]
                    raise _WrongError(
                        f"{self._cited(place)} reads {buffer.name}{box_text(box)}, but not all of "
                        "the rows before its own have been stored"
                    )
            done.update(writes)
            tiles += writes
        if not disjoint(tiles):
            name = self._check.program.buffers[number].name
            raise _WrongError(f"{self._cited(self._start)} and those after it change {name} twice")

    def _resumes(self, box: Box, writes: Sequence[Box], done: set[Box]) -> bool:
        """Return whether a state is read of earlier rows, which have been written, and its own."""
        for layer, (first, stop), *rest in [box]:
            rows = [(layer, (row, row + 1), *rest) for row in range(first, stop)]
            return rows[-1] in writes and all(row in done for row in rows[:-1])
        return False

    def _cited(self, number: int) -> str:
        return cited(self._check.program, number)

    def _number(self, operand: str) -> int:
        own = vars(self._one).get(operand)
        number: int = attrgetter(operand)(self._at) if own is None else own
        return number

    # What meanings ask for

    @property
    def heads(self) -> Sequence[int]:
        """The head that each reader reads."""
        try:
            return heads_of(self._own)
        except ValueError as wrong:
            raise _WrongError(f"{self._cited(self._start)} and those after it {wrong}") from None

    def shape(self, operand: str) -> tuple[int, ...]:
        return self._check.program.buffers[self._number(operand)].shape

    def input(self, name: str) -> Any:
        return self._opened.operand(self._check.expected.input(name))

    def new(self, operand: str) -> Any:
        return self._opened.operand(self._opened.kept[operand, self._at.layer])

    def call(self, name: str, *operands: Any) -> Any:
        args = [getattr(operand, "kind", operand) for operand in operands]
        terms = self._check.terms
        special = {
            "sum": terms.total,
            "linear of columns": terms.linear_of_columns,
            "greatest": terms.greatest,
            "gated experts": terms.gated_experts,
            "sum of experts": terms.sum_of_experts,
            "best of rows": terms.best_of_rows,
            "its row": terms.its_row,
        }
        made = special[name](*args) if name in special else terms.call(name, *args)
        return self._opened.operand(made)

    def __getitem__(self, operand: str) -> Any:
        if self._number(operand) == NONE:
            return None
        return self.part(operand)

    def part(self, operand: str, *part: Part, rank: int | None = None) -> Any:
        number = self._number(operand) + (rank or 0)
        self._read.add((number, operand))
        return self._opened.operand(self._value(number, operand, part))

    def _value(self, number: int, operand: str, part: tuple[Part, ...]) -> Term:
        check = self._check
        buffer = check.program.buffers[number]
        if buffer.role == Role.WEIGHT:
            weight = check.expected.parameter(buffer.name, buffer.rank)
            assert weight is not None, "its buffer was checked"
            return weight
        frame = frame_of(buffer.shape, part)
        held = check.contents.at(number, frame)
        if held is None and not check.contents.touched(number, frame):
            if buffer.role.kind == "scratch":
                raise _WrongError(
                    f"{self._cited(self._start)} reads {operand} from {buffer.name}"
                    f"{box_text(frame)}, but no instruction stores a value there as a whole"
                )
            return self._before(number, part)
        if held is None or held.missing:
            missing = [frame] if held is None else held.missing
            value = "" if held is None else f" of {self._named(held.value)}"
            raise _UnfinishedError(
                f"{self._cited(self._start)} reads {operand} from {buffer.name}, but no "
                f"instruction before it stores {_listed(buffer.name, missing)}{value}"
            )
        return held.value

    def _named(self, value: Term) -> str:
        return self._check.expected.names.get(value, str(value))

    def _before(self, number: int, part: tuple[Part, ...]) -> Term:
        """Return the contents of a buffer before the step."""
        check, buffer = self._check, self._check.program.buffers[number]
        name = buffer.role.word
        if buffer.role in (Role.COS, Role.SIN):
            return check.expected.table(name, buffer.shape[1], buffer.dtype)
        if buffer.role in (Role.TAILS, Role.STATES):
            return check.expected.layer_of(name, part[0], buffer.rank)
        return check.expected.input(name)


def _fits(value: Term, frame: Box) -> bool:
    """Return whether a value has as many elements per row as a frame."""
    return prod(value.shape[1:]) == prod(stop - start for start, stop in frame[1:])


def _tiles(own: Sequence[Any], number: int) -> tuple[list[Box], tuple[tuple[int, int], ...]]:
    """Return the tiles of instructions in a buffer, and the rows of a head if they are blocks."""
    if not own[0].joins:
        return [box for one in own for buffer, box in one.writes if buffer == number], ()
    joins = [join for one in own for join in one.joins if join.region.buffer == number]
    return [(*join.region.box, join.part) for join in joins], ((0, joins[0].whole),)
