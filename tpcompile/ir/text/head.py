"""The parser of the header of a graph's text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tpcompile.errors import UsageError
from tpcompile.ir.info import GraphInfo, RotarySource
from tpcompile.ir.layout import Interval, Layout
from tpcompile.ir.plan import HeadPlan, Plan
from tpcompile.ir.text.folding import unfolded
from tpcompile.ir.text.header import usual_weight
from tpcompile.ir.text.scanner import Scanner
from tpcompile.ir.text.types import TypeParser

MOST_RANKS = 512
_MOST_UNITS = 1 << 22
_LAYOUT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:#[0-9]+)?")
_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_FOLDED = re.compile(r"[A-Za-z0-9_.{},@/-]+")
_USER = re.compile(r"%([A-Za-z0-9_{}.,]*[A-Za-z0-9_}])")
_PART = re.compile(r" \((rank|layer) ")
"""The suffix that marks the text of one rank or layer."""
_TITLES = ("layouts", "plan", "biases")


@dataclass
class Head:
    """The parsed header of a graph's text."""

    info: GraphInfo
    layouts: dict[str, Layout] = field(default_factory=dict)
    count: int = 0
    """The number of its lines."""

    @staticmethod
    def read(lines: Sequence[Scanner]) -> Head:
        """Read the header from the first lines of a text."""
        if not lines:
            raise UsageError(
                "The text of a graph is empty", expected="a line such as `graph x (tp=1)`"
            )
        head = Head(_first(lines[0]), count=1)
        section = ""
        for line in lines[1:]:
            if line.indent and section:
                head._in_section(section, line)
            elif line.text in _TITLES:
                section = line.text
            elif section or not head._property(line):
                break
            head.count += 1
        return head

    def _property(self, line: Scanner) -> bool:
        """Read the model or its rotary module, if the line has one of them."""
        if line.accept("model "):
            self.info.model = line.name("the class of the model")
            line.expect_end()
        elif line.accept("rotary "):
            path = line.match(_PATH, "a class of transformers").group()
            line.expect(" ")
            self.info.rotary = RotarySource(path, _object(line))
        else:
            return False
        return True

    def _in_section(self, section: str, line: Scanner) -> None:
        if section == "layouts":
            self._layout(line)
        elif section == "plan":
            self._plan(line)
        else:
            self.info.biases |= set(_biases(line))

    def _layout(self, line: Scanner) -> None:
        match = line.match(_LAYOUT, "the name of a layout")
        if match.group() in self.layouts:
            raise line.refusal(f"The layout {match.group()} is defined twice")
        line.expect(" = ")
        units = line.integer("a number of units")
        if not 0 < units <= _MOST_UNITS:
            raise line.refusal(f"A layout has from 1 to {_MOST_UNITS:,} units")
        line.expect(": ")
        parts = [_part(line, units)]
        while line.accept(" | "):
            parts.append(_part(line, units))
        line.expect_end()
        self.layouts[match.group()] = Layout(match.group(1), units, 1, tuple(parts))

    def _plan(self, line: Scanner) -> None:
        types = TypeParser(self.layouts, self.info.tp)
        parsed = [types.layout(line, None)]
        if line.accept(" ") and not line.sees(": "):
            parsed.append(types.layout(line, None))
            line.expect(" ")
        layouts = [layout for layout in parsed if isinstance(layout, Layout)]
        if len(layouts) != len(parsed):
            raise line.refusal("A plan has no fused layouts")
        plan = self.info.plan or Plan(self.info.tp, {}, {}, layouts[0])
        if line.at_end():
            self.info.plan = Plan(plan.tp, plan.heads, plan.ffn, layouts[0])
            return
        line.expect(": ")
        for name in _users(line):
            if len(layouts) == 2:
                plan.heads[name] = HeadPlan(*layouts)
            else:
                plan.ffn[name] = layouts[0]
        self.info.plan = plan


def _first(line: Scanner) -> GraphInfo:
    if not line.accept("graph "):
        raise line.refusal("This is not the text of a graph", "a line such as `graph x (tp=1)`")
    name = line.name("the name of the graph")
    if part := _PART.match(line.text, line.place):
        raise line.refusal(
            f"The text of one {part.group(1)} cannot be parsed",
            hint="Print the whole graph, without --rank and --layer",
        )
    line.expect(" (tp=")
    tp = line.integer("the number of ranks")
    if not 1 <= tp <= MOST_RANKS:
        raise line.refusal(f"tp must be from 1 to {MOST_RANKS:,}, got {tp}")
    line.expect(")")
    line.expect_end()
    return GraphInfo(name, tp, outputs=())


def _object(line: Scanner) -> str:
    """Read a JSON object, and return it in the form in which it is printed."""
    start = line.place
    text = line.rest()
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        line.place = start
        raise line.refusal("The configuration is not valid", "an object in JSON")
    return json.dumps(config, sort_keys=True)


def _part(line: Scanner, units: int) -> tuple[Interval, ...]:
    """Read the units of a rank."""
    intervals: list[Interval] = []
    while not intervals or (line.sees(" ") and not line.sees(" | ")):
        if intervals:
            line.expect(" ")
        start = line.integer("the first unit")
        line.expect("-")
        stop = line.integer("the last unit")
        if not start < stop <= units:
            raise line.refusal(f"{start}-{stop} is not inside of the {units} units")
        intervals.append((start, stop))
    return tuple(intervals)


def _users(line: Scanner) -> Iterator[str]:
    """Read the names of the nodes that have a layout."""
    first = True
    while first or line.accept(", "):
        first = False
        yield from _names(line, line.match(_USER, "a value such as %l{0..3}_attention").group(1))
    line.expect_end()


def _names(line: Scanner, text: str) -> list[str]:
    try:
        return unfolded(text)
    except ValueError as error:
        raise line.refusal("The numbers in braces are not valid", str(error)) from error


def _biases(line: Scanner) -> Iterator[tuple[str, str]]:
    """Read the (bias, weight) pairs of tensor names of a line."""
    if line.sees('"'):
        biases = [line.name("a tensor")]
    else:
        biases = _names(line, line.match(_FOLDED, "the name of a tensor").group())
    if line.accept(" of "):
        yield biases[0], line.name("a tensor")
    else:
        yield from ((bias, usual_weight(bias)) for bias in biases)
    line.expect_end()
