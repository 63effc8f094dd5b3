"""Writes a rank's module: a method for each layer, a line for each op."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx

from tpcompile.errors import UnsupportedError
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import (
    info_of,
    operand,
    origin_of,
    parameter_of,
    parameters,
    type_of,
    value_type,
)
from tpcompile.ir.ops import ALL_GATHER, ALL_REDUCE, LINEAR, REDISTRIBUTE, REDUCE_SCATTER, spec_of
from tpcompile.ir.simulate import local_args

aten = torch.ops.aten

_HEADER = '''"""{name}, rank {rank} of {ranks}. Made by tpcompile; `group` joins the ranks."""

import torch
from torch.nn import functional as F

from tpcompile.backends.torch_tp import functions as tpc

# parameter: (shape on this rank, what it is made of)
PARAMETERS = {{
{parameters}
}}


class Rank{rank}(torch.nn.Module):
    def __init__(self, parameters, rotary, group):
        super().__init__()
        for name, (shape, _) in PARAMETERS.items():
            assert parameters[name].shape == shape, (name, parameters[name].shape, shape)
            self.register_parameter(name, torch.nn.Parameter(parameters[name], False))
        self.rotary = rotary
        self.group = group
'''


@dataclass(frozen=True)
class _Section:
    """Nodes that become one method, and the values that go in and come out."""

    method: str
    nodes: list[fx.Node]
    reads: list[fx.Node]
    writes: list[fx.Node]


def emit_source(gm: fx.GraphModule, rank: int) -> str:
    """The module of one rank, as Python."""
    info = info_of(gm)
    header = _HEADER.format(
        name=re.sub(r"[^\w .-]", "_", info.name),
        rank=rank,
        ranks=info.tp,
        parameters="\n".join(
            f'    "{node.target}": ({value_type(node).local_shape(rank)}, '
            f'"{parameter_of(node).describe(rank)}"),'
            for node in parameters(gm.graph)
        ),
    )
    sections = _sections(gm.graph)
    lines = [header, *_forward(gm.graph, sections, rank)]
    for section in sections:
        if section.method:
            lines += ["", *_method(section, rank)]
    return "\n".join(lines) + "\n"


def _sections(graph: fx.Graph) -> list[_Section]:
    nodes = [n for n in graph.nodes if n.op in ("call_function", "call_module")]
    found: list[_Section] = []
    taken: set[str] = set()
    for layer, run in groupby(nodes, key=lambda node: origin_of(node).layer):
        own = list(run)
        inside = set(own)
        reads = _unique(
            n
            for node in own
            for n in node.all_input_nodes
            if n not in inside and n.op != "get_attr"
        )
        writes = [node for node in own if any(user not in inside for user in node.users)]
        method = "" if layer is None else f"layer_{layer}"
        while method in taken:
            method += "_more"
        taken |= {method} - {""}
        found.append(_Section(method, own, reads, writes))
    return found


def _unique(nodes: Iterator[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))


def _forward(graph: fx.Graph, sections: list[_Section], rank: int) -> Iterator[str]:
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    yield f"    def forward(self, {', '.join(inputs)}):"
    for section in sections:
        if section.method:
            reads = ", ".join(node.name for node in section.reads)
            writes = ", ".join(node.name for node in section.writes)
            yield f"        {writes} = self.{section.method}({reads})"
        else:
            yield from _body(section.nodes, rank)
    output = next(node for node in graph.nodes if node.op == "output")
    yield f"        return {_value(output.args[0])}"


def _method(section: _Section, rank: int) -> Iterator[str]:
    reads = ", ".join(node.name for node in section.reads)
    yield f"    def {section.method}(self, {reads}):"
    yield from _body(section.nodes, rank)
    yield f"        return {', '.join(node.name for node in section.writes)}"


def _body(nodes: list[fx.Node], rank: int) -> Iterator[str]:
    for node in nodes:
        if node.target is operator.getitem:
            first = _item_names(operand(node))[int(node.args[1])]  # type: ignore[arg-type]
            if first != node.name:
                yield f"        {node.name} = {first}"
            continue  # the others are unpacked where the values are made
        place = origin_of(node)
        yield f"        {_targets(node)} = {_call(node, rank)}  # {place}".rstrip(" #")


def _targets(node: fx.Node) -> str:
    return ", ".join(_item_names(node)) if isinstance(type_of(node), tuple) else node.name


def _item_names(node: fx.Node) -> list[str]:
    """What the several values of a node are called; `_` where nobody reads one."""
    kind = type_of(node)
    assert isinstance(kind, tuple)
    names = ["_"] * len(kind)
    for user in reversed(node.users):
        names[int(user.args[1])] = user.name  # type: ignore[arg-type]
    return names


def _call(node: fx.Node, rank: int) -> str:
    spec = spec_of(node)
    if spec is None or node.target is REDISTRIBUTE:
        raise UnsupportedError(
            f"%{node.name} has no form in torch",
            where=str(origin_of(node)),
            hint="End the pipeline with insert-collectives or later",
        )
    arguments = {**spec.bind(node.args, dict(node.kwargs)), **local_args(node, spec, rank)}
    writer = _WRITERS.get(node.target)
    if writer is not None:
        return writer(node, {name: _value(arg) for name, arg in arguments.items()})
    for name in reversed(list(arguments)):
        if name not in spec.defaults or arguments[name] != spec.defaults[name]:
            break
        del arguments[name]
    values = [
        f"{name}={_value(arg)}" if name in spec.keyword_only else _value(arg)
        for name, arg in arguments.items()
    ]
    if node.op == "call_module":
        return f"self.{node.target}({', '.join(values)})"
    function = spec.name if spec.name.startswith("tpc.") else f"torch.ops.{spec.target}"
    return f"{function}({', '.join(values)})"


def _value(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return f"self.{arg.target}" if arg.op == "get_attr" else arg.name
    if isinstance(arg, list | tuple):
        inside = ", ".join(map(_value, arg))
        return f"({inside},)" if len(arg) == 1 else f"({inside})"
    return str(arg)


def _write_linear(node: fx.Node, args: dict[str, str]) -> str:
    bias = "" if args["bias"] == "None" else f", {args['bias']}"
    return f"F.linear({args['input']}, {args['weight']}{bias})"


def _write_gather(node: fx.Node, args: dict[str, str]) -> str:
    source = operand(node)
    layout = value_type(source).layout_of(int(args["dim"]))
    if isinstance(layout, Layout):
        extents = tuple(layout.extent(rank) for rank in range(layout.ranks))
        return f"self.group.all_gather({args['x']}, {args['dim']}, {extents})"
    return f"self.group.all_gather({args['x']}, {args['dim']})"


def _with_dtype(args: dict[str, str]) -> str:
    return args["x"] if args["dtype"] == "None" else f"{args['x']}, {args['dtype']}"


_WRITERS: dict[Any, Callable[[fx.Node, dict[str, str]], str]] = {
    LINEAR: _write_linear,
    ALL_GATHER: _write_gather,
    ALL_REDUCE: lambda _, a: f"self.group.all_reduce({_with_dtype(a)})",
    REDUCE_SCATTER: lambda _, a: f"self.group.reduce_scatter({_with_dtype(a)})",
    aten.to.dtype: lambda _, a: f"{a['self']}.to({a['dtype']})",
    aten.add.Tensor: lambda _, a: f"{a['self']} + {a['other']}",
    aten.embedding.default: lambda _, a: f"F.embedding({a['indices']}, {a['weight']})",
    aten.unflatten.int: lambda _, a: f"{a['self']}.unflatten({a['dim']}, {a['sizes']})",
    aten.flatten.using_ints: lambda _, a: f"{a['self']}.flatten({a['start_dim']}, {a['end_dim']})",
    aten.split_with_sizes.default: lambda _, a: (
        f"{a['self']}.split({a['split_sizes']}, {a['dim']})"
    ),
    aten.index_select.default: lambda _, a: f"{a['self']}.index_select({a['dim']}, {a['index']})",
}
