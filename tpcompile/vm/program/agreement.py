"""The check that shared operands of instructions agree with the program's buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.format import FLOAT_DTYPES
from tpcompile.vm.program.buffer import Buffer, Role
from tpcompile.vm.program.fields import Named, shared_rules
from tpcompile.vm.program.instruction import NONE
from tpcompile.vm.program.names import Names
from tpcompile.vm.program.rules import BufferRule, Chosen, FormatOf, Missing, Number, Real, Rule


class OperandProblem(NamedTuple):
    """A problem with one operand: the value found and the value expected."""

    operand: str
    got: str
    expected: str
    rule: str = "operands"
    """The broken rule: `bounds` if the buffer does not exist, `rank` if it is on another rank."""

    @property
    def message(self) -> str:
        return f"{self.operand} must be {self.expected}, got {self.got}"


@dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers of a program, by number and by role."""

    all: Sequence[Buffer]
    ranks: int
    roles: dict[tuple[Role, int], list[int]]
    """Buffer numbers by role and rank."""
    alike: dict[str, int] = field(default_factory=dict)
    """The numbers found so far of operands that are alike in all instructions."""

    @classmethod
    def of(cls, buffers: Sequence[Buffer], ranks: int) -> Buffers:
        roles: dict[tuple[Role, int], list[int]] = {}
        for number, buffer in enumerate(buffers):
            roles.setdefault((buffer.role, buffer.rank), []).append(number)
        return cls(buffers, ranks, roles)


class Agreement:
    """The shared operands of an instruction: their values by name, and their problems.

    Lower bounds of numbers are checked first, so that shapes are products of positive numbers
    only. Buffers are checked next; they bind the free names. Upper limits use those names and are
    checked last. Each check depends on the one before it.
    """

    def __init__(self, buffers: Buffers, kind: Any, operands: Any) -> None:
        self._buffers = buffers
        self.names = Names(operands, buffers.ranks)
        self._dtypes: dict[str, torch.dtype] = {}
        self.problems: list[OperandProblem] = []
        chosen = map(self._chosen, shared_rules(kind))
        rules = [named for named in chosen if not self._absent(named)]
        for check, kinds in (
            (self._check_least, (Number, Missing, Real)),
            (self._check_buffers, (Number, BufferRule)),
            (self._check_limits, (Number, FormatOf)),
        ):
            for named in rules:
                if isinstance(named.rule, kinds):
                    check(*named)
            if self.broken:
                return

    @property
    def broken(self) -> bool:
        """Whether the regions may be wrong. A buffer on another rank does not make them wrong."""
        return any(problem.rule != "rank" for problem in self.problems)

    def check_own(self, path: str, number: int, rule: BufferRule) -> None:
        """Check a buffer that is one of an instruction's own operands."""
        self._check_buffer(path, "", number, rule, self.names["rank"])

    def _refuse(self, path: str, got: object, expected: str, rule: str = "operands") -> None:
        self.problems.append(OperandProblem(path, str(got), expected, rule))

    def _chosen(self, named: Named) -> Named:
        path, prefix, rule = named
        if not isinstance(rule, Chosen):
            return named
        return Named(path, prefix, rule.rules[self.names[rule.operand]])

    def _absent(self, named: Named) -> bool:
        """Return whether an optional operand is absent."""
        return self.names[named.path] == NONE and getattr(named.rule, "optional", False)

    def _check_least(self, path: str, prefix: str, rule: Rule) -> None:
        value = self.names[path]
        if isinstance(rule, Number) and value < rule.least:
            self._refuse(path, value, f"at least {rule.least}")
        elif isinstance(rule, Number) and rule.alike:
            first = self._buffers.alike.setdefault(path, value)
            if value != first:
                self._refuse(path, value, f"{first}, as in the instructions before")
        elif isinstance(rule, Missing) and value != NONE:
            self._refuse(path, value, "none, because the instruction does not use it")
        elif isinstance(rule, Real) and not (math.isfinite(value) and value >= rule.least):
            least = "" if rule.least == -math.inf else f", at least {rule.least:g}"
            self._refuse(path, value, f"a finite number{least}")

    def _check_limits(self, path: str, prefix: str, rule: Rule) -> None:
        value = self.names[path]
        if isinstance(rule, FormatOf):
            stored = self._buffers.all[self.names[prefix + rule.operand]].stored
            if value != stored:
                self._refuse(path, value, f"{stored}, the format of {rule.operand}")
        if not isinstance(rule, Number):
            return
        exactly = [self.names.number(expression, prefix) for expression in rule.exactly]
        if exactly and value not in exactly:
            allowed = [number for number in exactly if number >= rule.least] or exactly
            self._refuse(path, value, " or ".join(map(str, allowed)))
        elif rule.most and value > self.names.number(rule.most, prefix):
            self._refuse(path, value, f"at most {self.names.number(rule.most, prefix)}")

    def _check_buffers(self, path: str, prefix: str, rule: Rule) -> None:
        if isinstance(rule, Number) and rule.fits is not None:
            rank = self.names["rank"]
            held = self._buffers.roles.get((rule.fits.role, rank), [])
            if len(held) != 1:
                role = f"{rule.fits.role.word}@{rank}"
                got = f"{self.names[path]} with {len(held)} buffers {role}"
                self._refuse(path, got, f"a value for exactly one buffer {role}")
            else:
                self._check_buffer(path, prefix, held[0], rule.fits, rank)
        if not isinstance(rule, BufferRule):
            return
        first, good = self.names[path], len(self.problems)
        ranks = range(self._buffers.ranks) if rule.each_rank else (self.names["rank"],)
        for place, rank in enumerate(ranks):
            self._check_buffer(path, prefix, first + place, rule, rank)
            if len(self.problems) > good:
                return

    def _check_buffer(
        self, path: str, prefix: str, number: int, rule: BufferRule, rank: int
    ) -> None:
        if not 0 <= number < len(self._buffers.all):
            self._refuse(path, f"buffer {number}", self._wanted(rule, prefix), "bounds")
            return
        buffer = self._buffers.all[number]
        if not self._fits(buffer, rule, prefix):
            self._refuse(path, _described(number, buffer), self._wanted(rule, prefix))
        elif rule.role.sole and len(self._buffers.roles[rule.role, buffer.rank]) > 1:
            only = f"the only buffer of role {rule.role.word} of rank {buffer.rank}"
            self._refuse(path, _described(number, buffer), only)
        elif buffer.rank != rank:
            self._refuse(path, _described(number, buffer), f"a buffer of rank {rank}", "rank")

    def _fits(self, buffer: Buffer, rule: BufferRule, prefix: str) -> bool:
        """Return whether role, dtype and shape agree. Bind the free names if they do."""
        if buffer.role != rule.role:
            return False
        matrix = rule.role == Role.WEIGHT and len(rule.shape) > 1
        in_format = buffer.format and (matrix or rule.role == Role.CACHE)
        if not in_format and not self._has_dtype(buffer.dtype, rule.dtype):
            return False
        bound: dict[str, int] = {}
        shapes = [(buffer.shape, rule.shape)]
        if rule.storage is not None:
            shapes.append((buffer.storage or (), rule.storage))
        for extents, wanted in shapes:
            if len(extents) != len(wanted):
                return False
            for extent, expression in zip(extents, wanted, strict=True):
                if not self.names.bind(extent, expression, prefix, bound):
                    return False
        self.names.update(bound)
        if isinstance(rule.dtype, str) and rule.dtype != "float" and buffer.format is None:
            self._dtypes.setdefault(rule.dtype, buffer.dtype)
        return True

    def _has_dtype(self, dtype: torch.dtype, wanted: torch.dtype | str) -> bool:
        if not isinstance(wanted, str):
            return dtype == wanted
        return dtype in FLOAT_DTYPES and self._dtypes.get(wanted, dtype) == dtype

    def _wanted(self, rule: BufferRule, prefix: str) -> str:
        """Describe the buffer that a rule requires, with the values of bound names."""

        def shown(shape: Sequence[str]) -> str:
            return "[" + ", ".join(self.names.shown(extent, prefix) for extent in shape) + "]"

        dtype = rule.dtype if isinstance(rule.dtype, str) else dtype_name(rule.dtype)
        dtype = dtype_name(self._dtypes[dtype]) if dtype in self._dtypes else dtype
        dtype = "float" if len(dtype) == 1 else dtype
        stored = "" if rule.storage is None else f", stored as {shown(rule.storage)}"
        return f"a {rule.role.word} buffer {dtype}{shown(rule.shape)}{stored}"


def _described(number: int, buffer: Buffer) -> str:
    stored = "" if buffer.storage is None else f", stored as {list(buffer.storage)}"
    return (
        f"buffer {number} ({buffer.role.word} buffer {buffer.name}@{buffer.rank} "
        f"{buffer.format or dtype_name(buffer.dtype)}{list(buffer.shape)}{stored})"
    )
