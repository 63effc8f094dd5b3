"""The parser of types in the text of a graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from tpcompile.ir.dtypes import DTYPES
from tpcompile.ir.format import Format
from tpcompile.ir.layout import AnyLayout, FusedLayout, Layout, TokenLayout
from tpcompile.ir.roles import (
    CacheOf,
    HeadParts,
    Interleaved,
    QueriesOf,
    Role,
    Run,
    SpansOf,
    StatesOf,
)
from tpcompile.ir.text.layouts import LayoutNames
from tpcompile.ir.text.printer import format_type
from tpcompile.ir.text.scanner import Scanner
from tpcompile.ir.types import (
    DISJOINT,
    PARTIAL,
    REPLICATE,
    AnyType,
    Dim,
    Placement,
    Shard,
    SymbolType,
    ValueType,
)

SYMBOL = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_PRODUCT = re.compile(r"(?:[1-9][0-9]{0,15}\*)?[A-Za-z][A-Za-z0-9_]*")
"""A symbolic extent, which may be merged with a known one, as in `8*T`."""
_LAYOUT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:#[0-9]+)?")
_STORED = re.compile(r"[a-z0-9:]+")
_PARTS = re.compile(r":[^,\]]*")
_TOKENS = re.compile(r":([1-9][0-9]{0,3})×")


class TypeParser:
    """A parser of types, given the layouts that the header defines."""

    def __init__(self, layouts: Mapping[str, Layout], ranks: int) -> None:
        self._layouts, self._ranks = layouts, ranks
        self._names = LayoutNames()
        self._names.add(layouts.values())

    def any(self, line: Scanner) -> AnyType:
        """Read a type, and check that it has the form in which it is printed."""
        start = line.place
        kind = self._any(line)
        wanted = format_type(kind, names=self._names)
        if line.text[start : line.place] != wanted:
            line.place = start
            raise line.refusal("The parts of a type do not agree with each other", wanted)
        return kind

    def _any(self, line: Scanner) -> AnyType:
        if line.accept("int "):
            return SymbolType(line.match(SYMBOL, "the name of an extent").group())
        if not line.accept("("):
            return self._value(line)
        parts = [self._value(line)]
        while not line.accept(")"):
            line.expect(", ")
            parts.append(self._value(line))
        return tuple(parts)

    def _value(self, line: Scanner) -> ValueType:
        dtype = read_dtype(line)
        line.expect("[")
        shape: list[Dim] = []
        parts: list[str] = []
        while not line.accept("]"):
            if shape:
                line.expect(", ")
            shape.append(_extent(line))
            match = _PARTS.match(line.text, line.place)
            parts.append(match.group() if match else "")
            line.place = match.end() if match else line.place
        line.expect(" ")
        placement = self._placement(line, shape, parts)
        stored = _format(line)
        return ValueType(tuple(shape), dtype, placement, _role(line), stored)

    def _placement(self, line: Scanner, shape: Sequence[Dim], parts: Sequence[str]) -> Placement:
        for plain in (REPLICATE, PARTIAL, DISJOINT):
            if line.accept(str(plain)):
                return plain
        line.expect("Shard(")
        start = line.place
        dim = line.integer("a dimension")
        if dim >= len(shape):
            line.place = start
            raise line.refusal("There is no such dimension", f"one of {len(shape)} dimensions")
        line.expect(", ")
        if line.accept("tokens"):
            ranks = _TOKENS.match(parts[dim])
            count = int(ranks.group(1)) if ranks else self._ranks
            layout: AnyLayout = TokenLayout(count, str(shape[dim]))
        else:
            layout = self.layout(line, shape[dim])
        line.expect(")")
        return Shard(dim, layout)

    def layout(self, line: Scanner, extent: Dim | None) -> Layout | FusedLayout:
        """Read a layout of an extent, or of the number of its units if no extent is given."""
        start = line.place
        layouts: list[Layout] = []
        grains: list[int] = []
        while not layouts or line.accept("+"):
            layouts.append(self._named(line))
            if line.accept("*"):
                grains.append(line.integer("the elements of a unit"))
        units = sum(layout.units for layout in layouts)
        if not grains:
            size = units if extent is None else extent
            whole = isinstance(size, int) and units and size % units == 0
            grains = [size // units] * len(layouts) if whole else []  # type: ignore[operator]
        if len(grains) != len(layouts) or 0 in grains:
            line.place = start
            raise line.refusal(f"The layout does not fit an extent of {extent}")
        segments = [layout.with_grain(g) for layout, g in zip(layouts, grains, strict=True)]
        return segments[0] if len(segments) == 1 else FusedLayout(tuple(segments))

    def _named(self, line: Scanner) -> Layout:
        start = line.place
        name = line.match(_LAYOUT, "the name of a layout").group()
        if name not in self._layouts:
            line.place = start
            known = ", ".join(self._layouts) or "no layouts"
            raise line.refusal(f"There is no layout {name}", f"one of the header: {known}")
        return self._layouts[name]


def _extent(line: Scanner) -> Dim:
    symbol = _PRODUCT.match(line.text, line.place)
    if symbol is None:
        return line.integer("an extent")
    line.place = symbol.end()
    return symbol.group()


def read_dtype(line: Scanner) -> torch.dtype:
    start = line.place
    name = line.match(SYMBOL, "a dtype").group()
    dtype = DTYPES.get(name, getattr(torch, name, None))
    if not isinstance(dtype, torch.dtype):
        line.place = start
        raise line.refusal(f"{name} is not a dtype", f"one of {', '.join(DTYPES)}")
    return dtype


def _format(line: Scanner) -> Format | None:
    """Read the format of a parameter, if it has one."""
    if not line.accept(" as "):
        return None
    start = line.place
    try:
        return Format.parsed(line.match(_STORED, "a format").group())
    except ValueError as error:
        line.place = start
        raise line.refusal("There is no such format", str(error)) from error


def _role(line: Scanner) -> Role | None:
    """Read the role of a value, if there is one."""
    if line.accept(" cache("):
        return CacheOf(*_named(line, "block"))
    if line.accept(" states"):
        return StatesOf()
    if line.accept(" queries("):
        return QueriesOf(*_named(line, "layer", "block"))
    for part in ("values", "lse"):
        if line.accept(f" {part}("):
            return SpansOf(part, *_named(line, "layer", "block", "spans"))
    if line.accept(" parts("):
        return HeadParts(tuple(_head_parts(line)))
    if not line.accept(" interleaved("):
        return None
    runs = [_run(line)]
    while not line.accept(")"):
        line.expect(", ")
        runs.append(_run(line))
    return Interleaved(tuple(runs))


def _head_parts(line: Scanner) -> Iterator[Run]:
    while True:
        rows = line.integer("a number of rows")
        if line.accept(" by "):
            width = line.integer("the width of a part")
            line.expect(" from ")
            first = line.integer("the first row of a part")
            line.expect(" of ")
            yield Run(rows, width, first, line.integer("the width of a head"))
        else:
            yield Run(rows)
        if line.accept(")"):
            return
        line.expect(", ")


def _named(line: Scanner, *names: str) -> list[int]:
    numbers = []
    for number, name in enumerate(names):
        line.expect(f", {name}=" if number else f"{name}=")
        numbers.append(line.integer(f"the {name}"))
    line.expect(")")
    return numbers


def _run(line: Scanner) -> tuple[int, int]:
    rows = line.integer("a number of rows")
    line.expect(" by ")
    return rows, line.integer("the width of a head")
