"""Op declarations: one per op, with everything that the toolkit needs to know about it.

An op of the dialect `tpc` is a real torch custom op. Its *reference* defines its semantics; its
*fake* gives shapes to tracers; its *rule* infers the type of the result from the types of the
operands, or refuses them; its *cost* counts work. For ATen ops torch provides the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, NoReturn, get_type_hints

import torch
from torch import fx

from tpcompile.ir.types import AnyType, Dim, ValueType
from tpcompile.ir.values.build import ValueRule

_LIBRARY: Any = torch.library.Library("tpc", "DEF")  # type: ignore[no-untyped-call]

Rule = Callable[..., AnyType]
Localize = Callable[..., dict[str, Any]]
Across = Callable[..., list[torch.Tensor]]


class RuleError(Exception):
    """Refusal of operands by a rule, and the type of the result without the mistake, if known."""

    def __init__(
        self, rule: str, got: str, expected: str, hint: str = "", result: AnyType | None = None
    ) -> None:
        self.rule, self.got, self.expected, self.hint = rule, got, expected, hint
        self.result = result
        super().__init__(f"{rule}: got {got}, expected {expected}")


@dataclass(frozen=True)
class Cost:
    """The work of one op on one rank for one token."""

    flops: int = 0
    memory_bytes: int = 0
    wire_bytes: int = 0


CostRule = Callable[[Any, Sequence[ValueType], int], Cost]
Written = Callable[..., str]
"""Formatter of a call as a Python expression, given the expressions of its arguments by name."""


@dataclass(frozen=True)
class OpSpec:
    """The declaration of an op. `localize` gives per-rank arguments, `across` runs collectives."""

    name: str
    target: Any
    rule: Rule
    cost: CostRule
    reference: Callable[..., Any]
    argument_names: tuple[str, ...]
    keyword_only: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict, hash=False)
    localize: Localize | None = None
    across: Across | None = None
    takes_roles: bool = False
    """Whether the rule handles roles; if not, operands with a role are refused."""
    in_formats: tuple[str, ...] = ()
    """The operands that may be parameters of any format; others are refused."""
    written: Written | None = None
    """Formatter of the call in emitted modules; by default they call the op itself."""
    pattern: Any = None
    """The calls that a composite op fuses; None for other ops."""
    value: ValueRule | None = None
    """The rule of the result's expression, given a scope and the arguments by name. None for an op
    that is only known to depend on its operands."""

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, in the order of the schema, with defaults filled in."""
        if len(args) > len(self.argument_names):
            raise TypeError(
                f"at most {len(self.argument_names)} arguments allowed, got {len(args)}"
            )
        positional = dict(zip(self.argument_names, args, strict=False))
        if len(positional) == len(self.argument_names) and not kwargs:
            return positional
        for name in kwargs:
            if name in positional:
                raise TypeError(f"the argument {name} is given twice")
            if name not in self.argument_names:
                raise TypeError(f"{self.name} has no argument {name}")
        arguments = {**self.defaults, **positional, **kwargs}
        return {name: arguments[name] for name in self.argument_names if name in arguments}

    def call(self, bound: dict[str, Any]) -> Any:
        """Run the op on tensors of one rank."""
        positional = [bound[n] for n in self.argument_names if n not in self.keyword_only]
        return self.target(*positional, **{n: bound[n] for n in self.keyword_only if n in bound})


SPECS: dict[Any, OpSpec] = {}
"""All ops, by node target."""


def define(
    reference: Callable[..., Any],
    *,
    rule: Rule,
    cost: CostRule,
    fake: Callable[..., Any] | None = None,
    name: str = "",
    overwrites: Sequence[str] = (),
    **others: Any,
) -> Any:
    """Declare an op of the dialect and return its node target.

    The op is named like its reference unless `name` is given, and its schema is the signature of
    the reference; `overwrites` names the operands that change in place. A reference that looks at
    elements needs another `fake`. `others` are fields of `OpSpec`.
    """
    name = _LIBRARY.define(schema_of(reference, name or reference.__name__, overwrites))
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tpc::{name}", fake or reference, lib=_LIBRARY)
    target = getattr(torch.ops.tpc, name).default
    return declare(target, rule, cost, reference=reference, **others)


_SCHEMA_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    int: "int",
    float: "float",
    bool: "bool",
    Sequence[int]: "int[]",
    torch.dtype: "ScalarType",
    tuple[torch.Tensor, torch.Tensor]: "(Tensor, Tensor)",
}
_SCHEMA_TYPES |= {kind | None: f"{word}?" for kind, word in _SCHEMA_TYPES.items()}


def schema_types(function: Callable[..., Any]) -> dict[str, str]:
    """Return the types of a function's parameters, and of its `return`, in a schema.

    Functions as parameters, which give other arithmetic, are not part of the schema.
    """
    hints = get_type_hints(function)
    return {name: _SCHEMA_TYPES[hint] for name, hint in hints.items() if hint in _SCHEMA_TYPES}


def schema_of(function: Callable[..., Any], name: str, overwrites: Sequence[str]) -> str:
    """Return the schema of an op with the signature of a function."""
    types = schema_types(function)
    result, words = types.pop("return"), []
    for parameter, kind in types.items():
        default = signature(function).parameters[parameter].default
        end = "" if default is Parameter.empty else f"={default}"
        alias = f"({'ab'[overwrites.index(parameter)]}!)" if parameter in overwrites else ""
        words.append(f"{kind}{alias} {parameter}{end}")
    return f"{name}({', '.join(words)}) -> {result}"


def declare(
    target: Any, rule: Rule, cost: CostRule, localize: Localize | None = None, **others: Any
) -> Any:
    """Declare a rule and a cost for an op of torch, and return its node target."""
    arguments = target._schema.arguments
    SPECS[target] = OpSpec(
        name=_packet_name(target),
        target=target,
        rule=rule,
        cost=cost,
        argument_names=tuple(a.name for a in arguments),
        keyword_only=tuple(a.name for a in arguments if a.kwarg_only),
        defaults={a.name: a.default_value for a in arguments if a.has_default_value()},
        localize=localize,
        **{"reference": target, **others},
    )
    return target


def spec_of(node: fx.Node) -> OpSpec | None:
    """Return the op that a node calls, or None if it calls no op of the dialect."""
    called = node.op in ("call_function", "call_module")
    return SPECS.get(node.target) if called else None


def package_of(node: fx.Node) -> str:
    """Return the package that declares the op of a node, or "" if it is tpcompile's own."""
    spec = spec_of(node)
    modules = (spec.reference, spec.rule) if spec else ()
    packages = {str(getattr(item, "__module__", None)).partition(".")[0] for item in modules}
    return next(iter(packages - _NO_PLUGINS), "")


_NO_PLUGINS = {__name__.partition(".")[0], "torch", "_operator", str(None)}
"""The packages of tpcompile's own ops; those of torch have no module."""


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of the schema."""
    return SPECS[node.target].bind(node.args, dict(node.kwargs))


def op_name(node: fx.Node) -> str:
    spec = spec_of(node)
    if spec:
        return spec.name
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _packet_name(target)
    return getattr(target, "__name__", str(target))


def _packet_name(target: torch._ops.OpOverload) -> str:
    """Return `aten.add` for `aten.add.Tensor`; the dialect has only one overload of each op."""
    return f"{target.namespace}.{target.__name__.partition('.')[0]}"


def refuse(
    rule: str, got: object, expected: str, hint: str = "", result: AnyType | None = None
) -> NoReturn:
    raise RuleError(rule, str(got), expected, hint, result)


def require(
    condition: object,
    rule: str,
    got: object,
    expected: str,
    hint: str = "",
    result: AnyType | None = None,
) -> None:
    if not condition:
        refuse(rule, got, expected, hint, result)


def dim_of(kind: ValueType, dim: int, extra: int = 0) -> int:
    """Return a dimension counted from the front; `extra` is 1 for ops that add a dimension."""
    rank = kind.dims + extra
    require(-rank <= dim < rank, "dimension", dim, f"one of the {rank} dimensions of {kind}")
    return dim % rank


def numel(shape: Sequence[Dim]) -> int:
    """Return the number of elements per token; symbolic extents count as one."""
    total = 1
    for extent in shape:
        total *= extent if isinstance(extent, int) else 1
    return total


def local_bytes(kind: ValueType, rank: int) -> int:
    """Return the bytes of a rank's part of a value or a parameter."""
    shape = kind.local_shape(rank)
    if kind.format is None:
        return numel(shape) * kind.dtype.itemsize
    return numel(shape[:-1]) * kind.format.row_bytes(*kind.columns(rank))


def streaming_cost(
    result: ValueType | tuple[ValueType, ...], operands: Sequence[ValueType], rank: int
) -> Cost:
    """Return the cost of reading operands, writing results, and one operation per element."""
    results = result if isinstance(result, tuple) else (result,)
    moved = sum(local_bytes(kind, rank) for kind in (*results, *operands))
    return Cost(flops=sum(numel(k.local_shape(rank)) for k in results), memory_bytes=moved)


def free_cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    """Return the cost of a view, which moves no data."""
    return Cost()
