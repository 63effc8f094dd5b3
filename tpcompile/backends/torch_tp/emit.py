"""Emitting a rank's module: one method per layer, one line per op."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from tpcompile.backends.torch_tp.expressions import AS_MATRIX, call_text, is_also_matrix, value_text
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import (
    OUTPUTS,
    operand,
    origin_of,
    parameter_of,
    parameters,
    type_of,
    value_type,
)

_HEADER = '''"""{name}, rank {rank} of {ranks}. Made by tpcompile. `group` runs the collectives."""

import torch
from torch.nn import functional as F

from tpcompile.backends.torch_tp import functions as tpc

# parameter: (shape on this rank, recipe)
PARAMETERS = {{
{parameters}
}}


class Rank{rank}(torch.nn.Module):
    def __init__(self, parameters, rotary, group):
        super().__init__()
        for name, (shape, _) in PARAMETERS.items():
            assert parameters[name].shape == shape, (name, parameters[name].shape, shape)
            self.register_parameter(name, torch.nn.Parameter(parameters[name], False))
{matrices}        self.rotary = rotary
        self.group = group
'''


@dataclass(frozen=True)
class _Section:
    """Nodes that become one method, with the values that it takes and returns."""

    method: str
    nodes: list[fx.Node]
    reads: list[fx.Node]
    writes: list[fx.Node]


@dataclass(frozen=True)
class _End:
    """A result and the nodes that only it depends on. They run if this result is requested."""

    name: str
    result: fx.Node
    nodes: list[fx.Node]


def emit_source(gm: fx.GraphModule, rank: int) -> str:
    """Return the module of one rank as Python source."""
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
        matrices="".join(
            f"        self.{node.target}{AS_MATRIX} = tpc.as_matrix(self.{node.target})\n"
            for node in parameters(gm.graph)
            if is_also_matrix(node)
        ),
    )
    ends = _ends(gm.graph)
    sections = _sections(gm.graph, [node for end in ends for node in end.nodes])
    lines = [header, *_forward(gm.graph, sections, ends, rank)]
    for section in sections:
        if section.method:
            lines += ["", *_method(section, rank)]
    return "\n".join(lines) + "\n"


def _ends(graph: fx.Graph) -> list[_End]:
    (found,) = next(node for node in graph.nodes if node.op == "output").args
    results = list(found) if isinstance(found, tuple | list) else [found]
    if len(results) == 1:
        return [_End(OUTPUTS[0], results[0], [])]
    needed = [_leading_to(result) for result in results]
    ends = []
    for name, result, own in zip(OUTPUTS, results, needed, strict=True):
        alone = own.difference(*(other for other in needed if other is not own))
        nodes = [node for node in graph.nodes if node in alone and node.op.startswith("call")]
        ends.append(_End(name, result, nodes))
    return ends


def _leading_to(result: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    ahead = [result]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += node.all_input_nodes
    return found


def _sections(graph: fx.Graph, apart: Collection[fx.Node]) -> list[_Section]:
    nodes = [n for n in graph.nodes if n.op.startswith("call") and n not in apart]
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


def _forward(
    graph: fx.Graph, sections: list[_Section], ends: list[_End], rank: int
) -> Iterator[str]:
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    inputs += [f'output="{ends[0].name}"'] if len(ends) > 1 else []
    yield f"    def forward(self, {', '.join(inputs)}):"
    for section in sections:
        if section.method:
            reads = ", ".join(node.name for node in section.reads)
            writes = ", ".join(node.name for node in section.writes)
            yield f"        {writes} = self.{section.method}({reads})"
        else:
            yield from _body(section.nodes, rank)
    for end in reversed(ends[1:]):
        yield f'        if output == "{end.name}":'
        yield from (f"    {line}" for line in _body(end.nodes, rank))
        yield f"            return {value_text(end.result)}"
    yield from _body(ends[0].nodes, rank)
    yield f"        return {value_text(ends[0].result)}"


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
            continue  # other results are named where their producer is emitted
        place = origin_of(node)
        yield f"        {_targets(node)} = {call_text(node, rank)}  # {place}".rstrip(" #")


def _targets(node: fx.Node) -> str:
    return ", ".join(_item_names(node)) if isinstance(type_of(node), tuple) else node.name


def _item_names(node: fx.Node) -> list[str]:
    """Return the names of a node's results; `_` for a result without readers."""
    kind = type_of(node)
    assert isinstance(kind, tuple)
    names = ["_"] * len(kind)
    for user in reversed(node.users):
        names[int(user.args[1])] = user.name  # type: ignore[arg-type]
    return names
