"""The parser of calls and of their operands in the text of a graph."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import fx

from tpcompile.errors import did_you_mean
from tpcompile.ir.ops import ROTARY, SPECS, OpSpec
from tpcompile.ir.text.scanner import Scanner
from tpcompile.ir.text.types import read_dtype

VALUE = re.compile(r"%([A-Za-z_][A-Za-z0-9_]*)")
_OP = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z0-9_.]+")
_OPTION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
_NUMBER = re.compile(r"-?(?:inf|nan|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)")
_INTEGER = re.compile(r"-?[0-9]+")
_WORDS = {"None": None, "True": True, "False": False, "max": sys.maxsize}
_DEEPEST = 8
_MOST_DIGITS = 18
"""The maximum number of digits of an integer."""


class OperandParser:
    """A parser of operands, given the values that earlier lines define."""

    def __init__(self, values: Mapping[str, fx.Node]) -> None:
        self._values = values
        self._ops = {spec.name: spec for spec in SPECS.values()} | {"tpc.rotary": SPECS[ROTARY]}

    def call(self, line: Scanner) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Read a call; return the op, and its arguments by position and by name."""
        spec = self._op(line)
        return spec.target, *self._arguments(line, spec)

    def _op(self, line: Scanner) -> OpSpec:
        start = line.place
        name = line.match(_OP, "an op, `input`, `param` or a value").group()
        if name not in self._ops:
            line.place = start
            raise line.refusal(f"There is no op {name}", hint=did_you_mean(name, self._ops))
        return self._ops[name]

    def _arguments(self, line: Scanner, spec: OpSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        line.expect("(")
        while not line.accept(")"):
            if args or kwargs:
                line.expect(", ")
            option = _OPTION.match(line.text, line.place)
            place = len(args)
            if option and option.group(1) not in spec.argument_names[place:]:
                names = ", ".join(spec.argument_names)
                raise line.refusal(f"{spec.name} takes no such argument here", f"({names})")
            if not option and (kwargs or place >= len(spec.argument_names)):
                raise line.refusal(f"{spec.name} has no argument at this place")
            line.place = option.end() if option else line.place
            value = self.any(line)
            if option and option.group(1) != spec.argument_names[place]:
                kwargs[option.group(1)] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    def any(self, line: Scanner, depth: int = 0) -> Any:
        """Read a value, a list, a string, a word, a number or a dtype."""
        if line.sees("%"):
            return self.value(line)
        if line.sees('"'):
            return line.name("a string")
        if line.accept("["):
            return self._list(line, depth)
        for word, value in _WORDS.items():
            if line.accept(word):
                return value
        return _number(line) if _NUMBER.match(line.text, line.place) else read_dtype(line)

    def _list(self, line: Scanner, depth: int) -> list[Any]:
        if depth > _DEEPEST:
            raise line.refusal("The list is nested too deeply")
        items: list[Any] = []
        while not line.accept("]"):
            if items:
                line.expect(", ")
            items.append(self.any(line, depth + 1))
        return items

    def value(self, line: Scanner) -> fx.Node:
        """Read the name of a value that an earlier line defines."""
        start = line.place
        name = line.match(VALUE, "a value such as %x").group(1)
        if name not in self._values:
            line.place = start
            hint = did_you_mean(name, self._values) if self._values else ""
            raise line.refusal(f"%{name} is not defined before this line", hint=hint)
        return self._values[name]


def _number(line: Scanner) -> int | float:
    start = line.place
    text = line.match(_NUMBER, "a number").group()
    if not _INTEGER.fullmatch(text):
        return float(text)
    if len(text) > _MOST_DIGITS:
        line.place = start
        raise line.refusal(f"An integer must have at most {_MOST_DIGITS} digits")
    return int(text)
