"""The checker: infers every type from the operands' and refuses what the rules refuse.

Parameters and inputs are declared; every other type is derived. So a graph is valid if each
parameter's recipes give what its type says, each op takes what it is given, and the result
is what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx

from tpcompile.errors import UnsupportedError, VerifyError
from tpcompile.ir.check_biases import wrong_biases
from tpcompile.ir.check_inputs import check_input, shared_layers
from tpcompile.ir.check_parameters import (
    check_parameter,
    check_ranks,
    check_whole,
    parameter_key,
    shared_tensors,
    unread_rows,
)
from tpcompile.ir.info import GraphInfo, info_of
from tpcompile.ir.meta import Parameter, made_of, origin_of, parameter_of
from tpcompile.ir.ops import SPECS, OpSpec, RuleError, op_name, spec_of
from tpcompile.ir.recipe import Tensor, tensors_of
from tpcompile.ir.text import format_node
from tpcompile.ir.types import AnyType, ValueType


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
    _parameters: dict[tuple[int, int], Parameter] = field(default_factory=dict)
    """Parameters found good, by identity and number of ranks."""
    _shapes_of_parameters: set[Any] = field(default_factory=set)
    """The same, but for the names of their tensors."""

    def check(self, gm: fx.GraphModule) -> list[Problem]:
        """Everything that is wrong; the types of all nodes are set on the way."""
        info = info_of(gm)
        problems: list[Problem] = []
        seen: set[fx.Node] = set()
        typed: set[fx.Node] = set()
        for node in gm.graph.nodes:
            early = [operand for operand in node.all_input_nodes if operand not in seen]
            seen.add(node)
            try:
                if early:
                    raise RuleError("order", f"a use of %{early[0].name}", "values made before")
                if typed.issuperset(node.all_input_nodes):
                    self._visit(node, info)
                    typed.add(node)
            except RuleError as error:
                problems.append(_problem(node, error))
        if all(node.op != "output" for node in seen):
            missing = RuleError("result", "no output", ", ".join(map(str, info.outputs)))
            problems.append(_problem(next(reversed(gm.graph.nodes)), missing))
        shared = (
            *shared_tensors(gm.graph),
            *unread_rows(gm.graph),
            *shared_layers(gm.graph),
            *wrong_biases(gm.graph, info),
        )
        problems += [_problem(node, error) for node, error in shared]
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
            check_input(node, info.tp)
        elif node.op == "get_attr":
            if "parameter" not in node.meta:
                raise RuleError("recipe", "no recipe", "a parameter made by new_parameter")
            parameter = parameter_of(node)
            self._check_parameter(parameter, info.tp)
            _check_made_of(node, parameter)
            node.meta["type"] = parameter.type
            if not node.users:
                made_of = f"{parameter.describe()}, which nothing reads"
                raise RuleError("unread", made_of, "parameters that are used")
        elif node.op == "output":
            _check_output(node, info)
        else:
            kind = self.infer(node)
            check_ranks(kind, info.tp)
            node.meta["type"] = kind

    def _check_parameter(self, parameter: Parameter, ranks: int) -> None:
        if (id(parameter), ranks) in self._parameters:
            return
        key = parameter_key(parameter, ranks)
        if key not in self._shapes_of_parameters:
            check_parameter(parameter, ranks)
            check_whole(parameter)
            self._shapes_of_parameters.add(key)
        self._parameters[id(parameter), ranks] = parameter

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
        key = (node.target, _told_apart(args), _told_apart(kwargs))
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = _apply_rule(SPECS[node.target], args, dict(kwargs))
        return found


def check_graph(gm: fx.GraphModule) -> list[Problem]:
    """Everything that is wrong with a graph."""
    return Checker().check(gm)


def verify_graph(gm: fx.GraphModule) -> None:
    """Raise `VerifyError` if anything is wrong with a graph."""
    Checker().verify(gm)


def infer_types(gm: fx.GraphModule, model: str = "The model") -> ValueType:
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
                    f"{model} does something that tpcompile cannot type (rule {error.rule})",
                    where=f"%{node.name} {origin_of(node)}",
                    got=error.got,
                    expected=error.expected,
                    hint=error.hint,
                ) from error
    raise AssertionError("a graph without an output")


_MEANINGLESS = (
    TypeError, AttributeError, LookupError, ValueError, ArithmeticError, AssertionError
)  # fmt: skip
"""What rules raise when they are given arguments that no schema allows."""


def _apply_rule(spec: OpSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> AnyType:
    """A rule may count on arguments as its schema has them; others are a problem of the node."""
    try:
        bound = spec.bind(args, kwargs)
        if not spec.takes_roles:
            _check_roles(spec, bound)
        return spec.rule(**bound)
    except _MEANINGLESS as error:
        expected = f"arguments ({', '.join(spec.argument_names)}) of {spec.name}"
        raise RuleError("arguments", f"{type(error).__name__}: {error}", expected) from error


def _check_roles(spec: OpSpec, bound: dict[str, Any]) -> None:
    """A role says more of a value than its numbers, which an op may not drop unasked."""
    for name, arg in bound.items():
        for kind in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(kind, ValueType) and kind.role is not None:
                raise RuleError("role", f"{name} {kind}", f"operands of {spec.name} without a role")


def _told_apart(arg: Any) -> Any:
    """A key in which 1, 1.0 and True differ, as they do for dtypes."""
    if isinstance(arg, tuple):
        return tuple(map(_told_apart, arg))
    return (type(arg), arg) if isinstance(arg, int | float) else arg


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


def _check_made_of(node: fx.Node, parameter: Parameter) -> None:
    found, captured = tuple(dict.fromkeys(tensors_of(parameter.whole))), made_of(node)
    if found != captured:
        raise RuleError(
            "recipe",
            f"a parameter made of {_tensors(found)}",
            f"{_tensors(captured)}, of which it was captured",
        )


def _tensors(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors)


def _problem(node: fx.Node, error: RuleError) -> Problem:
    return Problem(
        node=node.name,
        source=str(origin_of(node)),
        rule=error.rule,
        got=error.got,
        expected=error.expected,
        hint=error.hint,
        line=format_node(node),
    )
