"""The parser of a graph's text. Its errors cite the line."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import fx, nn

from tpcompile.errors import UsageError
from tpcompile.ir.meta import Origin, Parameter, new_parameter
from tpcompile.ir.module import StageModule
from tpcompile.ir.names import is_name
from tpcompile.ir.ops import ROTARY
from tpcompile.ir.recipe import Recipe, shape_of
from tpcompile.ir.text.head import Head
from tpcompile.ir.text.operands import VALUE, OperandParser
from tpcompile.ir.text.printer import INPUTS, OUTSIDE, RESULT, shards_of
from tpcompile.ir.text.recipes import RecipeParser, fits
from tpcompile.ir.text.scanner import Scanner
from tpcompile.ir.text.types import TypeParser
from tpcompile.ir.types import AnyType, ValueType

_UP_TO_TYPE = re.compile(r'(?:[^")]+|"(?:[^"\\]|\\.)*"|\)(?! : ))*')
_LAYER = re.compile(r"layer (0|[1-9][0-9]{0,5})")
_PLACE = re.compile(r"(\S+):(0|[1-9][0-9]{0,8})")


@dataclass
class GraphText:
    """A parsed graph, with the line of each node and the types that the text gives."""

    graph: fx.GraphModule
    lines: dict[str, int]
    types: dict[str, AnyType]


def read_graph(text: str) -> GraphText:
    """Parse the text of a graph without checking the graph."""
    if not isinstance(text, str):
        raise UsageError("parse_graph takes text", got=f"a {type(text).__name__}", expected="a str")
    lines = [
        Scanner(number, line)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    head = Head.read(lines)
    return _Parser(head).read(lines[head.count :], text.count("\n") + 1)


class _Parser:
    """A parser of the nodes of a graph."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._ranks = head.info.tp
        self._types = TypeParser(head.layouts, self._ranks)
        self._root = nn.Module()
        self._root.add_module(ROTARY, NoTables())
        self._graph = fx.Graph()
        self._values: dict[str, fx.Node] = {}
        self._operands = OperandParser(self._values)
        self._layer: int | None = None
        self._section = ""

    def read(self, lines: list[Scanner], end: int) -> GraphText:
        numbers: dict[str, int] = {}
        types: dict[str, AnyType] = {}
        outputs: tuple[ValueType, ...] | None = None
        for line in lines:
            if outputs is not None:
                raise line.refusal(
                    "The text goes on after the result",
                    hint="Give one graph, such as a file of dump --dump-dir",
                )
            if self._begins(line):
                continue
            if line.accept("return "):
                outputs = self._result(line)
                continue
            node, kind = self._node(line)
            numbers[node.name], types[node.name] = line.number, kind
            node.meta["type"] = kind
        if outputs is None:
            raise UsageError(
                "The text of the graph ends before its result",
                where=f"line {end}",
                expected="a line such as `return %logits : f32[R, 1000] Replicate`",
            )
        numbers["output"] = lines[-1].number
        gm = StageModule(self._root, self._graph)
        gm.meta["tpcompile"] = replace(self._head.info, outputs=outputs)
        return GraphText(gm, numbers, types)

    def _begins(self, line: Scanner) -> bool:
        """Return whether a line begins a section."""
        layer = _LAYER.fullmatch(line.text)
        if layer is None and line.text not in (INPUTS, OUTSIDE, RESULT):
            if not self._section:
                raise line.refusal("A section must begin here", repr(INPUTS))
            return False
        self._section = line.text
        self._layer = int(layer.group(1)) if layer else None
        return True

    def _node(self, line: Scanner) -> tuple[fx.Node, AnyType]:
        """Read a line that defines a value."""
        start = line.place
        name = line.match(VALUE, "a value such as %x, a section, or `return`").group(1)
        if name in self._values:
            line.place = start
            raise line.refusal(f"%{name} is defined twice")
        line.expect(" = ")
        if (line.sees("input :")) != (self._section == INPUTS):
            raise line.refusal(f"Inputs belong in the section {INPUTS!r}, and other values do not")
        builder = self._expression(line, name)
        line.expect(" : ")
        kind = self._types.any(line)
        origin = replace(_origin(line), layer=self._layer)
        node = builder(kind, origin)
        if node.name != name or not is_name(name):
            line.place = start
            raise line.refusal(f"%{name} is not a valid name for a value")
        self._values[name] = node
        return node, kind

    def _expression(self, line: Scanner, name: str) -> Callable[[AnyType, Origin], fx.Node]:
        """Read the expression of a value; return a function that adds its node."""
        if line.accept("input"):
            return lambda kind, origin: self._placeholder(name)
        if line.accept("param("):
            return self._parameter(line, name)
        if line.sees("%"):
            source = self._operands.value(line)
            line.expect("[")
            index = line.integer("the number of a result")
            line.expect("]")
            return lambda kind, origin: self._called(
                name, operator.getitem, (source, index), {}, origin
            )
        target, args, kwargs = self._operands.call(line)
        return lambda kind, origin: self._called(name, target, args, kwargs, origin)

    def _placeholder(self, name: str) -> fx.Node:
        return self._graph.placeholder(name)

    def _called(
        self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin
    ) -> fx.Node:
        op = "call_module" if target == ROTARY else "call_function"
        node = self._graph.create_node(op, target, args, kwargs, name=name)
        node.meta["origin"] = origin
        return node

    def _parameter(self, line: Scanner, name: str) -> Callable[[AnyType, Origin], fx.Node]:
        """Read the recipes of a parameter. Their tensors need its type, which comes after them."""
        start = line.place
        line.match(_UP_TO_TYPE, "a recipe")
        if not line.accept(") : "):
            raise line.refusal("The parameter has no type", "`) : ` and a type after the recipe")
        kind = self._types.any(line)
        if not isinstance(kind, ValueType) or not fits(_whole(kind)):
            raise line.refusal("A parameter must have the type of a tensor", "known extents")
        line.place = start
        parser = RecipeParser(line, _whole(kind), kind.format)
        whole = parser.recipe()
        shards: list[Recipe] = []
        while line.accept(f"; rank {len(shards)}: "):
            shards.append(parser.recipe())
        line.expect(")")
        parameter = self._with_shards(line, Parameter(kind, whole, tuple(shards)))

        def node(kind: AnyType, origin: Origin) -> fx.Node:
            return new_parameter(self._graph, name, parameter, origin, self._root)

        return node

    def _with_shards(self, line: Scanner, parameter: Parameter) -> Parameter:
        """Fill in the recipes of the ranks that follow from the type, if the line has none."""
        if parameter.shards:
            return parameter
        if shape_of(parameter.whole) != parameter.type.shape:
            raise line.refusal(
                f"The recipe has the shape {list(shape_of(parameter.whole))}",
                f"{list(parameter.type.shape)}, as in the type",
            )
        whole = replace(parameter, shards=(parameter.whole,) * self._ranks)
        return replace(whole, shards=shards_of(whole))

    def _result(self, line: Scanner) -> tuple[ValueType, ...]:
        """Read the line with the results; add the output node and return the expected types."""
        result = self._operands.any(line)
        values = result if isinstance(result, list) else [result]
        if not values or not all(isinstance(value, fx.Node) for value in values):
            raise line.refusal("The result must be a value, or a list of values")
        line.expect(" : ")
        kinds: list[ValueType] = []
        while not kinds or line.accept(", "):
            kind = self._types.any(line)
            if not isinstance(kind, ValueType):
                raise line.refusal("A result must have the type of a tensor")
            kinds.append(kind)
        line.expect_end()
        node = self._graph.output(result)
        node.meta["origin"] = Origin()
        return tuple(kinds)


def _whole(kind: ValueType) -> tuple[int, ...]:
    """Return the known extents of a type."""
    return tuple(extent for extent in kind.shape if isinstance(extent, int))


def _origin(line: Scanner) -> Origin:
    """Read the comment with the place in the user's model, if there is one."""
    if line.at_end():
        return Origin()
    line.expect("  # ")
    text = line.name("the origin") if line.sees('"') else line.rest()
    line.expect_end()
    module, _, last = text.rpartition(" ")
    place = _PLACE.fullmatch(last)
    if place is None:
        return Origin(module=text)
    return Origin(module, place.group(1), int(place.group(2)))


class NoTables(nn.Module):
    """The place of the rotary module in a graph that was parsed from text."""

    def forward(self, *args: Any) -> NoReturn:
        raise UsageError(
            "The rotary tables of a parsed graph are missing",
            hint="Parse the text with tpcompile.parse_graph, which makes them",
        )
