"""The regions of instructions, derived from the accesses in the rules of their operands.

Accesses are compiled to Python once per class of instructions. Regions that depend on shared
operands alone are made once for consecutive instructions with the same `at`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple, overload

from tpcompile.errors import UnsupportedError
from tpcompile.vm.program.fields import flat_fields, operands_of, rules_of
from tpcompile.vm.program.region import NONE, Join, Range, Region
from tpcompile.vm.program.rules import WHOLE, BufferRule, Chosen, Rule

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_OWN = re.compile(r"\binstruction\.(?!at\.)")


class Interval:
    """A range that instructions compute from operands, such as `"first_row + heads*width"`."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    @overload
    def __get__(self, instance: None, owner: Any) -> Interval: ...

    @overload
    def __get__(self, instance: object, owner: Any) -> Range: ...

    def __get__(self, instance: object | None, owner: Any) -> Interval | Range:
        return self if instance is None else Range(*_interval(owner, self.expression)(instance))


class _Source:
    """The source of expressions over the operands of an `instruction`, in Python."""

    def __init__(self, kind: Any, prefix: str = "") -> None:
        self._kind = kind
        self._prefix = prefix
        """The path of the dataclass whose names take precedence over outer names."""
        self._types = dict(flat_fields(kind))

    def number(self, expression: str) -> str:
        """Return the source of an expression over numbers."""
        return _NAME.sub(lambda name: self._operand(name[0])[0], expression)

    def interval(self, expression: str, extent: str = "") -> str:
        """Return the source of an interval."""
        attribute = getattr(self._kind, expression, None)
        if isinstance(attribute, Interval):
            expression = attribute.expression
        if expression.isidentifier():
            source, kind = self._operand(expression)
            if kind is Range:
                return source
        return f"({', '.join(self.edges(expression, extent))})"

    def edges(self, expression: str, extent: str = "") -> tuple[str, str]:
        """Return the source of the start and of the stop of an interval."""
        if expression.startswith(WHOLE):
            return "0", self.number(expression.removeprefix(WHOLE) or extent)
        *offsets, last = expression.split(" + ")
        name, *factors = last.split("*")
        source, kind = (name, int) if name.isdigit() else self._operand(name)
        before = "".join(f"{self.number(offset)} + " for offset in offsets)
        after = "".join(f"*{self.number(factor)}" for factor in factors)
        if kind is Range:
            return f"{before}{source}.start{after}", f"{before}{source}.stop{after}"
        return f"{before}{source}{after}", f"{before}({source} + 1){after}"

    def _operand(self, name: str) -> tuple[str, type]:
        """Return the source of a name and its type. In intervals, attributes must be ranges."""
        for path in (f"at.{self._prefix}{name}", f"at.{name}", name):
            if path in self._types:
                kind = self._types[path]
                source = f"instruction.{path}"
                return (f"int({source})" if issubclass(kind, IntEnum) else source), kind
        if hasattr(self._kind, name):
            return f"instruction.{name}", Range
        if hasattr(operands_of(self._kind), name):
            return f"instruction.at.{name}", int
        raise UnsupportedError(
            f"A rule of {self._kind.name} has an unknown name",
            got=name,
            expected="an operand, or an attribute of the instruction or of its shared operands",
        )


def regions_of(instruction: Any, mode: str) -> tuple[Region, ...]:
    """Return the regions that an instruction reads, writes or joins."""
    kind: Any = type(instruction)
    return _regions(kind, mode).of(instruction)


def joins_of(instruction: Any) -> tuple[Join, ...]:
    """Return the joins of an instruction, whose `arrival` completes the regions."""
    kind: Any = type(instruction)
    arrival = _arrival(kind)(instruction)
    return tuple(Join(region, *arrival) for region in _regions(kind, "joins").of(instruction))


class _Regions:
    """The regions that the instructions of one class read, write or join."""

    def __init__(self, kind: Any, mode: str) -> None:
        sources = [access.source for access in _accesses(kind) if access.mode == mode]
        self._shared, self._own = (
            _function(source for source in sources if bool(_OWN.search(source)) == is_own)
            for is_own in (False, True)
        )
        self._last: tuple[Any, tuple[Region, ...]] = None, ()
        """The last `at` and its regions: instructions with the same `at` follow each other."""

    def of(self, instruction: Any) -> tuple[Region, ...]:
        """Return the regions that depend on shared operands alone, then the others."""
        operands, shared = self._last
        if operands is not instruction.at:
            shared = self._shared(instruction)
            self._last = instruction.at, shared
        return shared + self._own(instruction)


_regions = cache(_Regions)


class _Compiled(NamedTuple):
    mode: str
    turn: int
    source: str
    """An element of a tuple of regions, in Python."""


@cache
def _accesses(kind: Any) -> list[_Compiled]:
    """Return the accesses of a class of instructions, in the order of their regions."""
    accesses: list[_Compiled] = []
    for path, prefix, rule in rules_of(kind):
        if isinstance(rule, Chosen):
            for value, chosen in rule.rules.items():
                where = f"instruction.at.{rule.operand} == {int(value)}"
                accesses += _compiled(_Source(kind, prefix), path, chosen, [where])
        else:
            accesses += _compiled(_Source(kind, prefix), path, rule, [])
    modes = {access.mode for access in accesses}
    if not modes or ("joins" in modes and kind.arrival is None):
        raise UnsupportedError(
            f"The rules of {kind.name} do not say which buffers it accesses",
            expected="rules with reads and writes, or with joins and an `arrival`",
        )
    return sorted(accesses, key=lambda access: access.turn)


def _compiled(source: _Source, path: str, rule: Rule, conditions: list[str]) -> Iterator[_Compiled]:
    """Yield the accesses of a rule, which apply if the conditions are met."""
    if not isinstance(rule, BufferRule):
        return
    if rule.optional:
        conditions = [*conditions, f"instruction.{path} != {NONE}"]
    for mode, part, turn, unless in rule.accesses:
        other = [] if unless is None else [f"{source.number(unless[0])} != {int(unless[1])}"]
        whole = (WHOLE,) * (len(rule.shape) - len(part))
        intervals = zip(part + whole, rule.shape, strict=True)
        box = "".join(f"{source.interval(*interval)}, " for interval in intervals)
        text = f"Region(instruction.{path}, ({box}))"
        if rule.each_rank:
            region = f"Region(instruction.{path} + rank, ({box}))"
            text = f"*[{region} for rank in range(instruction.at.ranks)]"
        if conditions or other:
            text = f"*(({text},) if {' and '.join(conditions + other)} else ())"
        yield _Compiled(mode, turn, text)


@cache
def _interval(kind: Any, expression: str) -> Callable[[Any], tuple[int, int]]:
    return _function(_Source(kind).edges(expression))


@cache
def _arrival(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    part, *numbers = kind.arrival
    return _function([_Source(kind).interval(part), *map(_Source(kind).number, numbers)])


def _function(sources: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Compile the sources of a tuple's elements to a function of an `instruction`."""
    function: Callable[[Any], tuple[Any, ...]] = eval(
        f"lambda instruction: ({''.join(f'{source}, ' for source in sources)})", {"Region": Region}
    )
    return function
