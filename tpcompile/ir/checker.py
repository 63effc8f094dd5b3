"""The checker: infers every type from the operands' and refuses what the rules refuse.

Parameters and inputs are declared; every other type is derived. So a graph is valid if each
parameter's recipes give what its type says, each op takes what it is given, and the result
is what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx

from tpcompile.errors import UnsupportedError, VerifyError
from tpcompile.ir.layout import Interval, TokenLayout
from tpcompile.ir.meta import GraphInfo, Parameter, info_of, origin_of, parameter_of
from tpcompile.ir.ops import SPECS, RuleError, op_name, spec_of
from tpcompile.ir.pieces import Piece, merge, pieces, restrict
from tpcompile.ir.recipe import shape_of
from tpcompile.ir.text import format_node
from tpcompile.ir.types import REPLICATE, AnyType, Shard, ValueType


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a graph."""

    node: str
    source: str
    rule: str
    got: str
    expected: str
    hint: str
    line: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        hint = f" {self.hint[0].upper()}{self.hint[1:]}." if self.hint else ""
        place = f" ({self.source})" if self.source else ""
        return (
            f"%{self.node}{place} breaks the rule {self.rule}: found {self.got}; "
            f"expected {self.expected}.{hint}\n    {self.line}"
        )


@dataclass
class Checker:
    """Checks graphs. What it has seen once, in this graph or in one before, is not done again."""

    _types: dict[Any, AnyType] = field(default_factory=dict)
    _parameters: dict[int, Parameter] = field(default_factory=dict)
    """Parameters found good, by identity."""

    def check(self, gm: fx.GraphModule) -> list[Problem]:
        """Everything that is wrong; the types of all nodes are set on the way."""
        info = info_of(gm)
        problems: list[Problem] = []
        known: set[fx.Node] = set()
        for node in gm.graph.nodes:
            if not known.issuperset(node.all_input_nodes):
                early = [n for n in node.all_input_nodes if n not in known and "type" in n.meta]
                if early and not problems:
                    problems.append(
                        _problem(
                            node,
                            "order",
                            f"a use of %{early[0].name}",
                            "values computed before they are used",
                        )
                    )
                continue
            try:
                self._visit(node, info)
            except RuleError as error:
                problems.append(_problem(node, error.rule, error.got, error.expected, error.hint))
                continue
            known.add(node)
        problems += _shared_tensors(gm.graph)
        return problems

    def verify(self, gm: fx.GraphModule) -> None:
        """Raise if anything is wrong."""
        problems = self.check(gm)
        if problems:
            first = problems[0]
            raise VerifyError(
                f"The graph is not valid: rule {first.rule} ({len(problems)} problems in all)",
                where=f"%{first.node} {first.source}",
                got=first.got,
                expected=first.expected,
                hint=f"{first.hint}\n    {first.line}",
            )

    def _visit(self, node: fx.Node, info: GraphInfo) -> None:
        if node.op == "placeholder":
            if node.meta["type"].placement != REPLICATE:
                raise RuleError("input", str(node.meta["type"]), "inputs on every rank")
        elif node.op == "get_attr":
            parameter = parameter_of(node)
            if id(parameter) not in self._parameters:
                check_parameter(parameter, info.tp)
                self._parameters[id(parameter)] = parameter
            node.meta["type"] = parameter.type
        elif node.op == "output":
            _check_output(node, info)
        else:
            node.meta["type"] = self.infer(node)

    def infer(self, node: fx.Node) -> AnyType:
        """The type of a node from those of its operands."""
        if spec_of(node) is None:
            raise RuleError(
                "known-op",
                op_name(node),
                "an op of the dialect",
                "give the op a rule in tpcompile/ir/ops, or raise it to an op that has one",
            )
        args = tuple(map(_typed, node.args))
        kwargs = tuple((name, _typed(arg)) for name, arg in node.kwargs.items())
        key = (node.target, args, kwargs)
        found = self._types.get(key)
        if found is None:
            spec = SPECS[node.target]
            found = spec.rule(**spec.bind(args, dict(kwargs)))
            self._types[key] = found
        return found


def check_graph(gm: fx.GraphModule) -> list[Problem]:
    """Everything that is wrong with a graph."""
    return Checker().check(gm)


def verify_graph(gm: fx.GraphModule) -> None:
    """Raise `VerifyError` if anything is wrong with a graph."""
    Checker().verify(gm)


def infer_types(gm: fx.GraphModule) -> ValueType:
    """Set the type of every node of a graph not yet sharded; the type of the result."""
    checker = Checker()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            node.meta["type"] = parameter_of(node).type
        elif node.op == "output":
            result: ValueType = node.args[0].meta["type"]
            return result
        elif node.op != "placeholder":
            try:
                node.meta["type"] = checker.infer(node)
            except RuleError as error:
                raise UnsupportedError(
                    f"The model does something that tpcompile cannot type (rule {error.rule})",
                    where=f"%{node.name} {origin_of(node)}",
                    got=error.got,
                    expected=error.expected,
                    hint=error.hint,
                ) from error
    raise AssertionError("a graph without an output")


def check_parameter(parameter: Parameter, ranks: int) -> None:
    """Refuse a parameter whose recipes do not give what its type says."""
    kind = parameter.type
    refusal = kind.refusal()
    if refusal:
        raise RuleError("layout", refusal, "a layout in which some rank holds each unit")
    if len(parameter.shards) != ranks:
        raise RuleError("recipe", f"{len(parameter.shards)} recipes", f"one a rank, {ranks}")
    if shape_of(parameter.whole) != kind.shape:
        raise RuleError("recipe", f"shape {shape_of(parameter.whole)}", f"{kind.shape}")
    whole = pieces(parameter.whole)
    for rank, recipe in enumerate(parameter.shards):
        if shape_of(recipe) != kind.local_shape(rank):
            raise RuleError(
                "recipe",
                f"shape {shape_of(recipe)} on rank {rank}",
                f"{kind.local_shape(rank)}, as {kind} gives it",
            )
        found = _boxes(pieces(recipe), kind)
        wanted = _boxes(_held_by(whole, kind, rank), kind)
        if found != wanted:
            raise RuleError(
                "recipe",
                f"{parameter.describe(rank)} on rank {rank}",
                f"the part of {parameter.describe()} that {kind} gives it",
                "make shards with Parameter.sharded, from the same layout",
            )


def _held_by(whole: tuple[Piece, ...], kind: ValueType, rank: int) -> tuple[Piece, ...]:
    if not isinstance(kind.placement, Shard):
        if kind.placement != REPLICATE:
            raise RuleError("partial-weight", str(kind), "a weight that is Replicate or Shard")
        return whole
    layout = kind.placement.layout
    if isinstance(layout, TokenLayout):
        raise RuleError("layout", str(kind), "a parameter split along its own axes")
    return restrict(whole, kind.placement.dim, layout.intervals(rank))


def _boxes(found: tuple[Piece, ...], kind: ValueType) -> dict[Any, list[Any]]:
    """Pieces by what they read elsewhere than along the split, with touching ones joined."""
    dim = kind.placement.dim if isinstance(kind.placement, Shard) else 0
    joined: dict[Any, list[Any]] = {}
    for piece in sorted(found, key=lambda p: (p.target[dim], p.tensor)):
        others = tuple(
            (runs, box)
            for d, (runs, box) in enumerate(zip(piece.source, piece.target, strict=True))
            if d != dim
        )
        indices = joined.setdefault((piece.tensor, others), [])
        start = piece.target[dim][0]
        for run in piece.source[dim]:
            _append(indices, start, run)
            start += len(run)
    return joined


def _append(indices: list[Any], start: int, run: range) -> None:
    if indices:
        last_start, last = indices[-1]
        if (
            last_start + len(last) == start
            and last.step == run.step
            and last[-1] + last.step == run[0]
        ):
            indices[-1] = (last_start, range(last[0], run[-1] + run.step, run.step))
            return
    indices.append((start, run))


def _typed(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        return arg.meta["type"]
    if isinstance(arg, list | tuple):
        return tuple(map(_typed, arg))
    return arg


def _check_output(node: fx.Node, info: GraphInfo) -> None:
    outputs = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
    found = tuple(_typed(output) for output in outputs)
    if found != info.outputs:
        raise RuleError(
            "result",
            ", ".join(map(str, found)),
            ", ".join(map(str, info.outputs)),
            "every rank returns the whole result",
        )


def _shared_tensors(graph: fx.Graph) -> Iterator[Problem]:
    """A checkpoint tensor (or a part of it) belongs to one parameter: tied weights stay one."""
    owners: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            for name in {piece.tensor for piece in pieces(parameter_of(node).whole)}:
                owners.setdefault(name, []).append(node)
    for name, nodes in owners.items():
        taken: list[Interval] = []
        for node in nodes if len(nodes) > 1 else ():
            rows = [
                (run.start, run.stop)
                for piece in pieces(parameter_of(node).whole)
                if piece.tensor == name
                for run in piece.source[0]
            ]
            merged = merge(taken + rows)
            if sum(b - a for a, b in merged) < sum(b - a for a, b in taken + rows):
                yield _problem(
                    node,
                    "one-owner",
                    f"a second parameter made of {name}",
                    "one parameter a checkpoint tensor, used as often as needed",
                    "tied weights stay one tensor",
                )
            taken = merged


def _problem(node: fx.Node, rule: str, got: str, expected: str, hint: str = "") -> Problem:
    origin = origin_of(node)
    return Problem(node.name, str(origin), rule, got, expected, hint, format_node(node))
