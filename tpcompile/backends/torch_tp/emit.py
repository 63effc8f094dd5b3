"""Emitting a rank's module: a class for each distinct layer, one line per call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from torch import fx

from tpcompile.alike import layers_by_key, runs_of
from tpcompile.backends.executor import TORCH
from tpcompile.backends.torch_tp.expressions import Line, Scope, statements
from tpcompile.backends.torch_tp.layers import (
    LayerCode,
    Section,
    kept_numbers,
    layer_codes,
    registering,
    reordering,
    sections_of,
)
from tpcompile.backends.torch_tp.storage import Storages, storages_of
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import OUTPUTS, origin_of, parameter_of, parameters
from tpcompile.ir.names import base_name
from tpcompile.ir.recipe import describe, shape_of
from tpcompile.pause import paused_collector

_HEADER = '''"""{name}, rank {rank} of {ranks}. Made by tpcompile. `group` runs the collectives."""

import torch
from torch.nn import functional as F

from {functions} import functions as tpc

# parameter: (shape on this rank, storage, recipe)
PARAMETERS = {{
{parameters}
}}
'''

_CLASS = """

class Rank{rank}(torch.nn.Module):
    def __init__(self, parameters, rotary, group):
        super().__init__()
        for name, (shape, _, _) in PARAMETERS.items():
            assert parameters[name].shape == shape, (name, parameters[name].shape, shape)
{parts}
        self.rotary = rotary
        self.group = group

    def forward(self, {inputs}):
{body}
"""


@dataclass(frozen=True)
class _End:
    """A result and the nodes that only it depends on. They run if this result is requested."""

    name: str
    result: fx.Node
    nodes: list[fx.Node]


@paused_collector()
def emit_sources(
    gm: fx.GraphModule, storages: Storages | None = None, functions: str = TORCH
) -> list[str]:
    """Return the module of each rank as Python source.

    `storages` are by default `storages_of`. `functions` is the package whose functions the source
    calls.
    """
    info, graph = info_of(gm), gm.graph
    storages = storages_of(graph) if storages is None else storages
    ends = _ends(graph)
    sections = sections_of(graph, [node for end in ends for node in end.nodes])
    scope = Scope(info.tp, storages, _outer_names(sections, graph))
    layers = [section.layer for section in sections if section.layer is not None]
    state_numbers = kept_numbers(graph)
    codes = [
        layer_codes(section, info.tp, storages, state_numbers)
        for section in sections
        if section.layer is not None
    ]
    registered = list(_registered(graph, scope))
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    inputs += [f'output="{ends[0].name}"'] if len(ends) > 1 else []
    forward = list(_forward(sections, ends, scope))
    sources = []
    for rank in range(info.tp):
        rank_codes = [code[rank] for code in codes]
        classes = _classes(layers, rank_codes)
        layer_lines = _layer_lines(layers, [classes[code][0] for code in rank_codes], state_numbers)
        module = _CLASS.format(
            rank=rank,
            parts="\n".join([*registered, *layer_lines]),
            inputs=", ".join(inputs),
            body="\n".join(line[rank] for line in forward),
        )
        layer_classes = (code.source(*arguments) for code, arguments in classes.items())
        header = _header(gm, rank, storages, functions)
        sources.append("".join([header, *layer_classes, module]))
    return sources


def _header(gm: fx.GraphModule, rank: int, storages: Storages, functions: str) -> str:
    return _HEADER.format(
        functions=functions,
        name=re.sub(r"[^\w .-]", "_", info_of(gm).name),
        rank=rank,
        ranks=info_of(gm).tp,
        parameters="\n".join(
            f'    "{node.target}{part.suffix}": ({shape_of(recipe)}, '
            f'"{storages[str(node.target)]}", "{describe(recipe)}"),'
            for node in parameters(gm.graph)
            for part, recipe in parameter_of(node).components(rank)
        ),
    )


def _ends(graph: fx.Graph) -> list[_End]:
    (output,) = next(node for node in graph.nodes if node.op == "output").args
    results = list(output) if isinstance(output, tuple | list) else [output]
    if len(results) == 1:
        return [_End(OUTPUTS[0], results[0], [])]
    needed = [_leading_to(result) for result in results]
    ends = []
    for name, result, ancestors in zip(OUTPUTS, results, needed, strict=True):
        alone = ancestors.difference(*(other for other in needed if other is not ancestors))
        nodes = [node for node in graph.nodes if node in alone and node.op.startswith("call")]
        ends.append(_End(name, result, nodes))
    return ends


def _leading_to(result: fx.Node) -> set[fx.Node]:
    visited: set[fx.Node] = set()
    ahead = [result]
    while ahead:
        node = ahead.pop()
        if node not in visited:
            visited.add(node)
            ahead += node.all_input_nodes
    return visited


def _outer_names(sections: Sequence[Section], graph: fx.Graph) -> dict[fx.Node, str]:
    """Name the results of layers by their role, unless a value with that name is read later."""
    place = {node: number for number, section in enumerate(sections) for node in section.nodes}
    taken = {node.name for node in graph.nodes if origin_of(node).layer is None}
    last_read: dict[str, int] = {}
    names: dict[fx.Node, str] = {}
    for number, section in enumerate(sections):
        for node in section.writes if section.layer is not None else ():
            name = base_name(node)
            if name in taken or last_read.get(name, number) > number:
                continue
            names[node] = name
            last_read[name] = max(place.get(user, len(sections)) for user in node.users)
    return names


def _classes(
    layers: Sequence[int], codes: Sequence[LayerCode]
) -> dict[LayerCode, tuple[str, list[int]]]:
    """Return the name of each class and the layers that it stands for."""
    kinds = layers_by_key(zip(layers, codes, strict=True))
    names: dict[LayerCode, tuple[str, list[int]]] = {}
    for code, numbers in kinds.items():
        name = f"Layer{numbers[0]}" if len(kinds) > 1 else "Layer"
        while any(name == other for other, _ in names.values()):
            name += "Rest"
        names[code] = name, numbers
    return names


def _registered(graph: fx.Graph, scope: Scope) -> Iterator[str]:
    """Yield the lines that register the parameters outside of the layers."""
    outside = [
        node
        for node in parameters(graph)
        if any(origin_of(user).layer is None for user in node.users)
    ]
    if outside:
        names = [name for node in outside for name in scope.components(node)]
        yield from registering(names, "parameters[name]")
    yield from reordering(outside, scope)


def _layer_lines(
    layers: Sequence[int], classes: Sequence[str], state_numbers: Mapping[int, int]
) -> Iterator[str]:
    """Yield the lines that construct the layers."""
    if not layers:
        return
    yield "        self.layers = torch.nn.ModuleList("
    yield "            ["
    for name, run in groupby(zip(classes, layers, strict=True), key=itemgetter(0)):
        numbers = [layer for _, layer in run]
        if len(numbers) == 1:
            shown = ", ".join(str(number) for number in _numbers(numbers[0], state_numbers))
            yield f"                {name}({shown}, parameters, group),"
            continue
        names = "layer, kept" if numbers[0] in state_numbers else "layer"
        arguments = _spelled(numbers, state_numbers)
        yield f"                *({name}({names}, parameters, group) for {names} in {arguments}),"
    yield "            ]"
    yield "        )"


def _numbers(layer: int, state_numbers: Mapping[int, int]) -> tuple[int, ...]:
    return (layer, state_numbers[layer]) if layer in state_numbers else (layer,)


def _spelled(layers: Sequence[int], state_numbers: Mapping[int, int]) -> str:
    """Return the expression of layers' arguments: their numbers, or pairs of numbers."""
    if layers[0] in state_numbers:
        expression = _range([state_numbers[layer] for layer in layers])
        return f"zip({_range(layers)}, {expression}, strict=True)"
    return _range(layers)


def _range(numbers: Sequence[int]) -> str:
    whole, *remaining = runs_of(numbers)
    return str(list(numbers) if remaining else whole)


def _forward(sections: Sequence[Section], ends: Sequence[_End], scope: Scope) -> Iterator[Line]:
    layers = sum(section.layer is not None for section in sections)
    done = 0
    for call, run in groupby(sections, key=lambda section: _call(section, scope)):
        several = list(run)
        if call is None:
            for section in several:
                yield from statements(section.nodes, scope)
            continue
        results, arguments = call
        if len(several) == 1:
            yield scope.line(f"        {results} = self.layers[{done}]({arguments})")
        else:
            last = done + len(several)
            bounds = f"[{done or ''}:{last if last < layers else ''}]".replace("[:]", "")
            yield scope.line(f"        for layer in self.layers{bounds}:")
            yield scope.line(f"            {results} = layer({arguments})")
        done += len(several)
    for end in reversed(ends[1:]):
        yield scope.line(f'        if output == "{end.name}":')
        for line in statements(end.nodes, scope):
            yield tuple(f"    {text}" for text in line)
        yield scope.line(f"            return {scope.text(end.result)}")
    yield from statements(ends[0].nodes, scope)
    yield scope.line(f"        return {scope.text(ends[0].result)}")


def _call(section: Section, scope: Scope) -> tuple[str, str] | None:
    """Return the results and arguments of a layer; calls that agree in both make one loop."""
    if section.layer is None:
        return None
    results, arguments = (
        ", ".join(map(scope.name, nodes)) for nodes in (section.writes, section.reads)
    )
    return results, arguments
