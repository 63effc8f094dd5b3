"""The Python expression of each op: the torch function if there is one, else the reference."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompile.backends.torch_tp import functions
from tpcompile.backends.torch_tp.storage import Storage, Storages
from tpcompile.errors import UnsupportedError
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import operand, origin_of, type_of, value_type
from tpcompile.ir.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ARGMAX,
    DECODE_OPS,
    EMBEDDING,
    EMBEDDINGS,
    EXPERTS,
    LINEAR,
    REDISTRIBUTE,
    REDUCE_SCATTER,
    SWIGLU,
    TOP_EXPERTS,
    VOCAB_EMBEDDING,
    OpSpec,
    arguments_of,
    spec_of,
)
from tpcompile.ir.ops.argmax import first_column
from tpcompile.ir.simulate import local_args

aten = torch.ops.aten


AS_MATRIX = "_matrix"
"""Suffix of the reordered copy of a parameter that is stored twice."""

ROUTER = "router"
"""The attribute of a layer that chooses its experts."""

_LAYER = "layer"
"""The argument of an op that is the number of its layer."""


Line = tuple[str, ...]
"""A line of code on each rank."""


@dataclass(frozen=True)
class Scope:
    """A body of code: the whole module, or one layer."""

    ranks: int
    storages: Storages
    names: Mapping[fx.Node, str]
    """The values and parameters that have other names here than in the graph."""
    layer: int | None = None
    kept: int | None = None
    """The number of the layer among those of its state; None if layers of one kind of mixer keep
    states, so that both numbers are the same."""

    def name(self, node: fx.Node) -> str:
        return self.names.get(node, node.name)

    def parameter(self, node: fx.Node) -> str:
        """Return the name of a parameter as an attribute of `self`."""
        return self.names.get(node, str(node.target))

    def components(self, node: fx.Node) -> list[str]:
        """Return the names of the components of a parameter as attributes of `self`."""
        return [
            f"{self.parameter(node)}{part.suffix}" for part in value_type(node).stored.components
        ]

    def text(self, arg: Any) -> str:
        """Return the source of an argument: a value, a parameter, or a constant."""
        if isinstance(arg, fx.Node):
            return f"self.{self.parameter(arg)}" if arg.op == "get_attr" else self.name(arg)
        if isinstance(arg, list | tuple):
            inside = ", ".join(map(self.text, arg))
            return f"({inside},)" if len(arg) == 1 else f"({inside})"
        return str(arg)

    def argument(self, name: str, arg: Any) -> str:
        """Return the source of a named argument; the number of the layer is an attribute."""
        if name == _LAYER and self.layer is not None:
            if arg == self.kept:
                return "self.kept"
            if self.kept is None and arg == self.layer:
                return "self.layer"
        return self.text(arg)

    def line(self, text: str) -> Line:
        """Return a line that is the same on every rank."""
        return (text,) * self.ranks


def statements(nodes: Iterable[fx.Node], scope: Scope) -> Iterator[Line]:
    """Yield one line per call, with its place in the model.

    A linear and the SwiGLU of its halves are one call.
    """
    nodes = list(nodes)
    linears = _linears_of_swiglus(nodes)
    inside = {node for linear in linears.values() for node in (linear, *linear.users)}
    for node in nodes:
        if node in inside or (node.target is operator.getitem and operand(node) in inside):
            continue
        if node.target is operator.getitem:
            first = _item_names(operand(node), scope)[int(node.args[1])]  # type: ignore[arg-type]
            if first != scope.name(node):
                yield scope.line(f"        {scope.name(node)} = {first}")
            continue  # other results are named where their producer is emitted
        yield _statement(node, scope, linears.get(node))


def _linears_of_swiglus(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the linear of each SwiGLU of both halves of one, if nothing else reads them."""
    linears, inside = {}, set(nodes)
    for node in nodes:
        sides = [operand(node), operand(node, 1)] if node.target is SWIGLU else []
        items = [side.args[1] for side in sides if side.target is operator.getitem]
        if items != [0, 1]:
            continue
        split = operand(sides[0])
        linear = operand(split)
        if split.target is not aten.split_with_sizes.default or linear.target is not LINEAR:
            continue
        last = value_type(linear).dims - 1
        users = [set(value.users) for value in (linear, split, *sides)]
        alone = users == [{split}, set(sides), {node}, {node}]
        if alone and linear in inside and arguments_of(split)["dim"] in (-1, last):
            linears[node] = linear
    return linears


def _statement(node: fx.Node, scope: Scope, linear: fx.Node | None = None) -> Line:
    """Return the statement of a call; between ranks, only local arguments differ.

    `linear` is the one whose halves the node reads, if one call computes both.
    """
    called = node if linear is None else linear
    spec = _emitted(called)
    local = [_local_args(called, spec, rank) for rank in range(scope.ranks)]
    targets, place = _targets(node, scope), _place(node, scope.layer)

    def text(args: dict[str, Any]) -> str:
        call = _call_text(called, spec, args, scope, linear is not None)
        return f"        {targets} = {call}  # {place}".rstrip(" #")

    if all(args == local[0] for args in local):
        return scope.line(text(local[0]))
    return tuple(map(text, local))


def _targets(node: fx.Node, scope: Scope) -> str:
    several = isinstance(type_of(node), tuple)
    return ", ".join(_item_names(node, scope)) if several else scope.name(node)


def _item_names(node: fx.Node, scope: Scope) -> list[str]:
    """Return the names of a node's results; `_` for a result without readers."""
    kind = type_of(node)
    assert isinstance(kind, tuple)
    names = ["_"] * len(kind)
    for user in reversed(node.users):
        names[int(user.args[1])] = scope.name(user)  # type: ignore[arg-type]
    return names


def _place(node: fx.Node, layer: int | None) -> str:
    """Return the place of a node in the model, or in its layer."""
    origin = origin_of(node)
    parts = origin.module.split(".")
    if layer is not None and str(layer) in parts:
        parts = parts[parts.index(str(layer)) + 1 :]
    return " ".join(filter(None, (".".join(parts), origin.place)))


def _emitted(node: fx.Node) -> OpSpec:
    """Return the op that a node calls, or refuse it."""
    spec = spec_of(node)
    if spec is None or node.target is REDISTRIBUTE or node.target in DECODE_OPS:
        decode = node.target in DECODE_OPS
        raise UnsupportedError(
            f"%{node.name} cannot be emitted as torch code",
            where=str(origin_of(node)),
            hint="Only programs support the ops of a decode step: end the pipeline with cache-kv"
            if decode
            else "End the pipeline with insert-collectives or later",
        )
    return spec


def _local_args(node: fx.Node, spec: OpSpec, rank: int) -> dict[str, Any]:
    """Return everything that differs between ranks in the expression of a node."""
    if node.target is ARGMAX:
        return {"first": first_column(value_type(operand(node)), rank)}
    columns = {
        f"{name}{_COLUMNS}": value_type(weight).columns(rank)
        for name, weight in _stored_weights(node).items()
    }
    return {**local_args(node, spec, rank), **columns}


_WEIGHTS = {
    LINEAR: ("weight",),
    **dict.fromkeys(EMBEDDINGS, ("weight",)),
    EXPERTS: ("gate_up", "down"),
}
"""The arguments of ops that may be weights of several components."""
_COLUMNS = "_columns"
"""The end of the name of the columns that such an argument has on a rank."""


def _stored_weights(node: fx.Node) -> dict[str, fx.Node]:
    """Return the weights of a node that have several components, by the names of its arguments."""
    arguments = arguments_of(node) if node.target in _WEIGHTS else {}
    return {
        name: arguments[name]
        for name in _WEIGHTS.get(node.target, ())
        if value_type(arguments[name]).format is not None
    }


def _call_text(
    node: fx.Node, spec: OpSpec, local: dict[str, Any], scope: Scope, swiglu: bool = False
) -> str:
    """Return the expression that computes a node, or the SwiGLU of its halves.

    `local` are its arguments that differ between ranks.
    """
    arguments = {**arguments_of(node), **local}
    writer = _write_linear_swiglu if swiglu else _WRITERS.get(node.target)
    if writer is not None or spec.written is not None:
        texts = {name: scope.text(arg) for name, arg in arguments.items()}
        return writer(node, texts, scope) if writer else spec.written(**texts)  # type: ignore[misc]
    for name in reversed(list(arguments)):
        if name not in spec.defaults or arguments[name] != spec.defaults[name]:
            break
        del arguments[name]
    values = [
        f"{name}={scope.text(arg)}" if name in spec.keyword_only else scope.argument(name, arg)
        for name, arg in arguments.items()
    ]
    if node.op == "call_module":
        return f"self.{node.target}({', '.join(values)})"
    has_function = spec.name.startswith("tpc.") and hasattr(
        functions, spec.name.removeprefix("tpc.")
    )
    function = spec.name if has_function else f"torch.ops.{spec.target}"
    return f"{function}({', '.join(values)})"


def _write_linear(
    node: fx.Node, args: dict[str, str], scope: Scope, function: str = "linear"
) -> str:
    bias = "" if args["bias"] == "None" else f", {args['bias']}"
    text = args["weight"]
    if _stored_weights(node):
        text = f"tpc.decoded({_stored_text(node, args, scope)})"
    elif scope.storages[str(operand(node, 1).target)] is Storage.BOTH:
        text += AS_MATRIX
    return f"tpc.{function}({args['input']}, {text}{bias})"


_write_linear_swiglu = partial(_write_linear, function="linear_swiglu")


def _write_embedding(node: fx.Node, args: dict[str, str], scope: Scope) -> str:
    table, ids = args["weight"], args["indices"]
    if _stored_weights(node):
        return f"tpc.decoded_rows({_stored_text(node, args, scope)}, {ids})"
    return f"F.embedding({ids}, {table})"


def _write_vocab_embedding(node: fx.Node, args: dict[str, str], scope: Scope) -> str:
    stored = _stored_weights(node)
    table = _stored_text(node, args, scope) if stored else args["weight"]
    name = "decoded_rows" if stored else "vocab_embedding"
    first = "" if args["first_row"] == "0" else f", {args['first_row']}"
    return f"tpc.{name}({table}, {args['ids']}{first})"


def _write_experts(node: fx.Node, args: dict[str, str], scope: Scope) -> str:
    texts = [args[name] for name in ("x", "scores", "ids")]
    for name in _WEIGHTS[EXPERTS]:
        stored = name in _stored_weights(node)
        text = (
            f"tpc.DecodedExperts({_stored_text(node, args, scope, name)})" if stored else args[name]
        )
        texts.append(text)
    texts += [] if args["first"] == "0" else [args["first"]]
    return f"tpc.experts({', '.join(texts)})"


def _stored_text(node: fx.Node, args: dict[str, str], scope: Scope, name: str = "weight") -> str:
    """Return the format, components, columns and dtype of a weight as arguments."""
    weight = _stored_weights(node)[name]
    kind = value_type(weight)
    parts = ", ".join(f"self.{component}" for component in scope.components(weight))
    return f'"{kind.format}", ({parts}), {args[name + _COLUMNS]}, {kind.dtype}'


def _write_gather(node: fx.Node, args: dict[str, str], scope: Scope) -> str:
    source = operand(node)
    layout = value_type(source).layout_of(int(args["dim"]))
    if isinstance(layout, Layout):
        extents = tuple(layout.extent(rank) for rank in range(layout.ranks))
        return f"self.group.all_gather({args['x']}, {args['dim']}, {extents})"
    return f"self.group.all_gather({args['x']}, {args['dim']})"


def _write_argmax(node: fx.Node, args: dict[str, str], scope: Scope) -> str:
    if value_type(operand(node)).layout_of(-1) is None:
        return f"tpc.argmax({args['logits']})"
    return f"self.group.argmax(*tpc.local_argmax({args['logits']}, {args['first']}))"


def _with_dtype(args: dict[str, str]) -> str:
    return args["x"] if args["dtype"] == "None" else f"{args['x']}, {args['dtype']}"


_WRITERS: dict[Any, Callable[[fx.Node, dict[str, str], Scope], str]] = {
    LINEAR: _write_linear,
    EXPERTS: _write_experts,
    ALL_GATHER: _write_gather,
    ARGMAX: _write_argmax,
    ALL_REDUCE: lambda _, a, scope: f"self.group.all_reduce({_with_dtype(a)})",
    REDUCE_SCATTER: lambda _, a, scope: f"self.group.reduce_scatter({_with_dtype(a)})",
    TOP_EXPERTS: lambda _, a, scope: f"self.{ROUTER}({', '.join(a.values())})",
    aten.to.dtype: lambda _, a, scope: f"{a['self']}.to({a['dtype']})",
    aten.add.Tensor: lambda _, a, scope: f"{a['self']} + {a['other']}",
    aten.mul.Tensor: lambda _, a, scope: f"{a['self']} * {a['other']}",
    aten.silu.default: lambda _, a, scope: f"tpc.silu({a['self']})",
    aten.sigmoid.default: lambda _, a, scope: f"tpc.sigmoid({a['self']})",
    aten.softplus.default: lambda _, a, scope: f"tpc.softplus({a['self']})",
    aten.gelu.default: lambda _, a, scope: (
        f"tpc.gelu({a['self']}, approximate={a['approximate']!r})"
    ),
    aten.relu.default: lambda _, a, scope: f"F.relu({a['self']})",
    aten.tanh.default: lambda _, a, scope: f"{a['self']}.tanh()",
    EMBEDDING: _write_embedding,
    VOCAB_EMBEDDING: _write_vocab_embedding,
    aten.unflatten.int: lambda _, a, scope: f"{a['self']}.unflatten({a['dim']}, {a['sizes']})",
    aten.flatten.using_ints: lambda _, a, scope: (
        f"{a['self']}.flatten({a['start_dim']}, {a['end_dim']})"
    ),
    aten.split_with_sizes.default: lambda _, a, scope: (
        f"{a['self']}.split({a['split_sizes']}, {a['dim']})"
    ),
    aten.index_select.default: lambda _, a, scope: (
        f"{a['self']}.index_select({a['dim']}, {a['index']})"
    ),
}
