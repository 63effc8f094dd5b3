"""The checker of graphs: it infers the type of every node and reports violations of the rules.

The types of parameters and inputs are declared; every other type is inferred from the operands. A
graph is therefore valid if each parameter's recipes produce what its type describes, each op
accepts its operands, and the result has the expected type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

from torch import fx

from tpcompile.errors import UnsupportedError, VerifyError
from tpcompile.ir.check_biases import computed_weights, wrong_biases
from tpcompile.ir.check_inputs import check_input, shared_layers, strayed_items
from tpcompile.ir.check_parameters import (
    check_parameter,
    check_ranks,
    check_whole,
    parameter_key,
    shared_tensors,
    tensor_owners,
    unread_rows,
)
from tpcompile.ir.info import GraphInfo, info_of
from tpcompile.ir.meta import Parameter, has_recipe, made_of, origin_of, parameter_of
from tpcompile.ir.ops import OpSpec, RuleError, op_name, spec_of
from tpcompile.ir.problem import Problem, problem_of
from tpcompile.ir.recipe import Tensor, tensors_of
from tpcompile.ir.types import AnyType, ValueType


@dataclass
class Checker:
    """A graph checker with a cache.

    It infers an op's type from the same operand types only once, and checks a parameter only once,
    also across graphs. A node whose call and operand types are the same objects is not inferred
    again.
    """

    _types: dict[Any, AnyType] = field(default_factory=dict)
    _parameters: dict[tuple[int, int], tuple[Parameter, tuple[Tensor, ...]]] = field(
        default_factory=dict
    )
    """Parameters found valid with their tensors, by identity and number of ranks."""
    _shapes_of_parameters: set[Any] = field(default_factory=set)
    """Keys of parameters found valid, without the names of their tensors."""
    _calls: dict[fx.Node, tuple[tuple[Any, ...], AnyType]] = field(default_factory=dict)
    """The last valid call of each node, with the types of its operands, and its type."""

    def check(self, gm: fx.GraphModule) -> list[Problem]:
        """Return every problem of a graph, and set the types of its nodes."""
        info = info_of(gm)
        problems: list[Problem] = []
        visited: set[fx.Node] = set()
        typed: set[fx.Node] = set()
        for node in gm.graph.nodes:
            operands = node.all_input_nodes
            visited.add(node)
            try:
                if not visited.issuperset(operands) or node in operands:
                    early = next(n for n in operands if n is node or n not in visited)
                    raise RuleError("order", f"a use of %{early.name}", "its definition first")
                if typed.issuperset(operands):
                    self._visit(node, operands, info)
                    typed.add(node)
            except RuleError as error:
                problems.append(problem_of(node, error))
                if error.result is not None:
                    node.meta["type"] = error.result
        if problems:
            problems = self._with_others(gm.graph, typed, problems)
        if all(node.op != "output" for node in visited):
            missing = RuleError("result", "no output", ", ".join(map(str, info.outputs)))
            problems.append(problem_of(next(reversed(gm.graph.nodes)), missing))
        owners = tensor_owners(gm.graph)
        shared = (
            *shared_tensors(owners),
            *unread_rows(owners),
            *shared_layers(gm.graph),
            *strayed_items(gm.graph),
            *computed_weights(gm.graph),
            *wrong_biases(gm.graph, info),
        )
        problems += [problem_of(node, error) for node, error in shared]
        return problems

    def _with_others(
        self, graph: fx.Graph, typed: set[fx.Node], problems: list[Problem]
    ) -> list[Problem]:
        """Add the other calls that break a rule alike, as if the values they use had no problem.

        Values with a problem are taken to have the type that the rule names, or that they had.
        """
        names: dict[Any, list[str]] = {problem.key: [] for problem in problems}
        wrong = {problem.node for problem in problems}
        for node in graph.nodes:
            is_known = node in typed or node.name in wrong or node.op != "call_function"
            if is_known or any(n.meta.get("type") is None for n in node.all_input_nodes):
                continue
            try:
                node.meta["type"] = self.infer(node)
            except RuleError as error:
                names.get(problem_of(node, error).key, []).append(node.name)
        return [replace(problem, others=tuple(names.pop(problem.key, ()))) for problem in problems]

    def verify(self, gm: fx.GraphModule) -> None:
        """Raise `VerifyError` with the first problem of a graph, if there is any."""
        problems = self.check(gm)
        if problems:
            first = problems[0]
            raise VerifyError(
                f"The graph violates the rule {first.rule} ({len(problems)} problems in all)",
                where=f"%{first.node} {first.source}",
                got=first.got,
                expected=first.expected,
                hint=f"{first.hint}\n    {first.line}",
            )

    def _visit(self, node: fx.Node, operands: list[fx.Node], info: GraphInfo) -> None:
        if node.op == "placeholder":
            check_input(node, info.tp)
        elif node.op == "get_attr":
            if not has_recipe(node):
                raise RuleError("recipe", "no recipe", "a parameter made by new_parameter")
            parameter = parameter_of(node)
            _check_made_of(node, self._tensors_of(parameter, info.tp))
            node.meta["type"] = parameter.type
            if not node.users:
                made_of = f"{parameter.describe()}, which no node reads"
                raise RuleError("unread", made_of, "a parameter that some node reads")
        elif node.op == "output":
            _check_output(node, info)
        else:
            node.meta["type"] = self._called(node, operands, info.tp)

    def _called(self, node: fx.Node, operands: list[fx.Node], ranks: int) -> AnyType:
        """Return the type of a call. If nothing about it has been replaced, it is the last one."""
        types = [operand.meta["type"] for operand in operands]
        call = (node.target, node.args, node.kwargs, ranks, *types)
        known = self._calls.get(node)
        if known is not None and len(known[0]) == len(call) and all(map(is_, known[0], call)):
            return known[1]
        kind = self.infer(node)
        check_ranks(kind, ranks)
        self._calls[node] = call, kind
        return kind

    def _tensors_of(self, parameter: Parameter, ranks: int) -> tuple[Tensor, ...]:
        """Check a parameter, and return the checkpoint tensors that it is made of."""
        known = self._parameters.get((id(parameter), ranks))
        if known is not None:
            return known[1]
        key = parameter_key(parameter, ranks)
        if key not in self._shapes_of_parameters:
            check_parameter(parameter, ranks)
            check_whole(parameter)
            self._shapes_of_parameters.add(key)
        tensors = tuple(dict.fromkeys(tensors_of(parameter.whole)))
        self._parameters[id(parameter), ranks] = parameter, tensors
        return tensors

    def infer(self, node: fx.Node) -> AnyType:
        """Return the type of a node, inferred from the types of its operands."""
        spec = spec_of(node)
        if spec is None:
            raise RuleError(
                "known-op",
                op_name(node),
                "an op of the dialect",
                "give the op a rule in tpcompile/ir/ops, or raise it to an op that has one",
            )
        key = (node.target, _type_key(node.args), *map(_type_key, node.kwargs.items()))
        inferred = self._types.get(key)
        if inferred is None:
            kwargs = {name: _typed(arg) for name, arg in node.kwargs.items()}
            inferred = self._types[key] = _apply_rule(spec, tuple(map(_typed, node.args)), kwargs)
        return inferred


def check_graph(gm: fx.GraphModule) -> list[Problem]:
    """Return every problem of a graph."""
    return Checker().check(gm)


def verify_graph(gm: fx.GraphModule) -> None:
    """Raise `VerifyError` if a graph has any problem."""
    Checker().verify(gm)


def infer_types(gm: fx.GraphModule, model: str = "The model") -> ValueType:
    """Set the type of every node of an unsharded graph, and return the type of the result."""
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
                raise _unsupported(node, error, model) from error
    raise AssertionError("a graph without an output")


def _unsupported(node: fx.Node, error: RuleError, model: str) -> UnsupportedError:
    """Return the refusal of a model for an operation without a rule, or whose rule refuses it."""
    name, place = op_name(node), str(origin_of(node))
    if spec_of(node) is None:
        return UnsupportedError(
            f"{model} computes {name}, which tpcompile cannot shard",
            where=place,
            expected="the operations of a model type in docs/running.md",
            hint="A plugin can add a rule for the operation: see docs/extending.md",
        )
    return UnsupportedError(
        f"{model} computes {name} in a form that tpcompile cannot shard (rule {error.rule})",
        where=place,
        got=error.got,
        expected=error.expected,
        hint=error.hint,
    )


_MEANINGLESS = (
    TypeError, AttributeError, LookupError, ValueError, ArithmeticError, AssertionError
)  # fmt: skip
"""The exceptions that rules raise for arguments that violate an op's schema."""


def _apply_rule(spec: OpSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> AnyType:
    """Apply an op's rule; report arguments that violate the op's schema as a problem of the node.

    A rule may assume that its arguments match the schema.
    """
    try:
        bound = spec.bind(args, kwargs)
        _check_operands(spec, bound)
        return spec.rule(**bound)
    except _MEANINGLESS as error:
        expected = f"arguments ({', '.join(spec.argument_names)}) of {spec.name}"
        raise RuleError("arguments", f"{type(error).__name__}: {error}", expected) from error


def _check_operands(spec: OpSpec, bound: dict[str, Any]) -> None:
    """Refuse operands with a role or a format that the op does not handle.

    Both carry information beyond a value's elements, which an op must not drop silently.
    """
    for name, arg in bound.items():
        for kind in arg if isinstance(arg, tuple) else (arg,):
            if not isinstance(kind, ValueType):
                continue
            if kind.role is not None and not spec.takes_roles:
                raise RuleError("role", f"{name} {kind}", f"operands of {spec.name} without a role")
            if kind.format is not None and name not in spec.in_formats:
                raise RuleError(
                    "format", f"{name} {kind}", f"operands of {spec.name} stored as their values"
                )


def _type_key(arg: Any) -> Any:
    """Return a key of an argument's types; 1, 1.0 and True differ, as they give other dtypes."""
    if isinstance(arg, fx.Node):
        return arg.meta["type"]
    if isinstance(arg, list | tuple):
        return tuple(map(_type_key, arg))
    return type(arg), arg


def _typed(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        return arg.meta["type"]
    if isinstance(arg, list | tuple):
        return tuple(map(_typed, arg))
    return arg


def _check_output(node: fx.Node, info: GraphInfo) -> None:
    outputs = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
    output_types = tuple(_typed(output) for output in outputs)
    if output_types != info.outputs:
        raise RuleError(
            "result",
            ", ".join(map(str, output_types)),
            ", ".join(map(str, info.outputs)),
            "every rank must return the whole result",
        )


def _check_made_of(node: fx.Node, tensors: tuple[Tensor, ...]) -> None:
    captured = made_of(node)
    if tensors != captured:
        raise RuleError(
            "recipe",
            f"a parameter made of {_tensors(tensors)}",
            f"{_tensors(captured)}, from which it was captured",
        )


def _tensors(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors)
