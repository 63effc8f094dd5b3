"""The Python expression of each op: the torch function if there is one, else the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tpcompile.backends.torch_tp import functions
from tpcompile.errors import UnsupportedError
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import operand, origin_of, value_type
from tpcompile.ir.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ARGMAX,
    DECODE_OPS,
    LINEAR,
    REDISTRIBUTE,
    REDUCE_SCATTER,
    spec_of,
)
from tpcompile.ir.ops.argmax import first_column
from tpcompile.ir.simulate import local_args

aten = torch.ops.aten


def call_text(node: fx.Node, rank: int) -> str:
    """Return the expression that computes a node on a rank."""
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
    arguments = {**spec.bind(node.args, dict(node.kwargs)), **local_args(node, spec, rank)}
    writer = _WRITERS.get(node.target)
    if writer is not None:
        return writer(node, {name: value_text(arg) for name, arg in arguments.items()}, rank)
    for name in reversed(list(arguments)):
        if name not in spec.defaults or arguments[name] != spec.defaults[name]:
            break
        del arguments[name]
    values = [
        f"{name}={value_text(arg)}" if name in spec.keyword_only else value_text(arg)
        for name, arg in arguments.items()
    ]
    if node.op == "call_module":
        return f"self.{node.target}({', '.join(values)})"
    own = spec.name.startswith("tpc.") and hasattr(functions, spec.name.removeprefix("tpc."))
    function = spec.name if own else f"torch.ops.{spec.target}"
    return f"{function}({', '.join(values)})"


AS_MATRIX = "_matrix"
"""Suffix of the reordered copy of a linear's weight that another op reads too, row by row."""


def is_matrix(parameter: fx.Node) -> bool:
    """Return whether only linears read a parameter, as their weight, so it may be reordered."""
    return all(_is_weight_of(parameter, user) for user in parameter.users)


def is_also_matrix(parameter: fx.Node) -> bool:
    """Return whether a linear and another op read a parameter, as with a tied head."""
    of_linear = any(_is_weight_of(parameter, user) for user in parameter.users)
    return of_linear and not is_matrix(parameter)


def _is_weight_of(parameter: fx.Node, user: fx.Node) -> bool:
    return user.target is LINEAR and user.args[1] is parameter and parameter not in user.args[2:]


def value_text(arg: Any) -> str:
    """Return the source of an argument: a value's name, a parameter of the module, or a number."""
    if isinstance(arg, fx.Node):
        return f"self.{arg.target}" if arg.op == "get_attr" else arg.name
    if isinstance(arg, list | tuple):
        inside = ", ".join(map(value_text, arg))
        return f"({inside},)" if len(arg) == 1 else f"({inside})"
    return str(arg)


def _write_linear(node: fx.Node, args: dict[str, str], rank: int) -> str:
    bias = "" if args["bias"] == "None" else f", {args['bias']}"
    weight = operand(node, 1)
    name = args["weight"] if is_matrix(weight) else f"{args['weight']}{AS_MATRIX}"
    return f"tpc.linear({args['input']}, {name}{bias})"


def _write_gather(node: fx.Node, args: dict[str, str], rank: int) -> str:
    source = operand(node)
    layout = value_type(source).layout_of(int(args["dim"]))
    if isinstance(layout, Layout):
        extents = tuple(layout.extent(rank) for rank in range(layout.ranks))
        return f"self.group.all_gather({args['x']}, {args['dim']}, {extents})"
    return f"self.group.all_gather({args['x']}, {args['dim']})"


def _write_argmax(node: fx.Node, args: dict[str, str], rank: int) -> str:
    logits = value_type(operand(node))
    if logits.layout_of(-1) is None:
        return f"{args['logits']}.argmax(-1)"
    first = first_column(logits, rank)
    return f"self.group.argmax(*tpc.local_argmax({args['logits']}, {first}))"


def _with_dtype(args: dict[str, str]) -> str:
    return args["x"] if args["dtype"] == "None" else f"{args['x']}, {args['dtype']}"


_WRITERS: dict[Any, Callable[[fx.Node, dict[str, str], int], str]] = {
    LINEAR: _write_linear,
    ALL_GATHER: _write_gather,
    ARGMAX: _write_argmax,
    ALL_REDUCE: lambda _, a, rank: f"self.group.all_reduce({_with_dtype(a)})",
    REDUCE_SCATTER: lambda _, a, rank: f"self.group.reduce_scatter({_with_dtype(a)})",
    aten.to.dtype: lambda _, a, rank: f"{a['self']}.to({a['dtype']})",
    aten.add.Tensor: lambda _, a, rank: f"{a['self']} + {a['other']}",
    aten.mul.Tensor: lambda _, a, rank: f"{a['self']} * {a['other']}",
    aten.gelu.default: lambda _, a, rank: f"F.gelu({a['self']}, approximate={a['approximate']!r})",
    aten.relu.default: lambda _, a, rank: f"F.relu({a['self']})",
    aten.tanh.default: lambda _, a, rank: f"{a['self']}.tanh()",
    aten.embedding.default: lambda _, a, rank: f"F.embedding({a['indices']}, {a['weight']})",
    aten.unflatten.int: lambda _, a, rank: f"{a['self']}.unflatten({a['dim']}, {a['sizes']})",
    aten.flatten.using_ints: lambda _, a, rank: (
        f"{a['self']}.flatten({a['start_dim']}, {a['end_dim']})"
    ),
    aten.split_with_sizes.default: lambda _, a, rank: (
        f"{a['self']}.split({a['split_sizes']}, {a['dim']})"
    ),
    aten.index_select.default: lambda _, a, rank: (
        f"{a['self']}.index_select({a['dim']}, {a['index']})"
    ),
}
