"""Emitting a rank's module: a class for each distinct layer, one line per op."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from tpcompile.backends.torch_tp.expressions import Scope, statements
from tpcompile.backends.torch_tp.layers import (
    LayerCode,
    Section,
    layer_code,
    registering,
    reordering,
    sections_of,
)
from tpcompile.backends.torch_tp.storage import Storages, storages_of
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import OUTPUTS, origin_of, parameter_of, parameters, value_type
from tpcompile.ir.names import base_name

_HEADER = '''"""{name}, rank {rank} of {ranks}. Made by tpcompile. `group` runs the collectives."""

import torch
from torch.nn import functional as F

from tpcompile.backends.torch_tp import functions as tpc

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


@dataclass(frozen=True)
class _Call:
    """A call of a layer: its class, and the statement that runs it."""

    layer: int
    name: str
    results: str
    arguments: str


def emit_source(gm: fx.GraphModule, rank: int, storages: Storages | None = None) -> str:
    """Return the module of one rank as Python source; `storages` are by default `storages_of`."""
    info, graph = info_of(gm), gm.graph
    storages = storages_of(graph) if storages is None else storages
    ends = _ends(graph)
    sections = sections_of(graph, [node for end in ends for node in end.nodes])
    scope = Scope(rank, storages, _outer_names(sections, graph))
    codes = [
        None if section.layer is None else layer_code(section, rank, storages)
        for section in sections
    ]
    classes = _classes(sections, codes)
    steps = [
        section if code is None else _call(section, classes[code][0], scope)
        for section, code in zip(sections, codes, strict=True)
    ]
    calls = [step for step in steps if isinstance(step, _Call)]
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    inputs += [f'output="{ends[0].name}"'] if len(ends) > 1 else []
    header = _HEADER.format(
        name=re.sub(r"[^\w .-]", "_", info.name),
        rank=rank,
        ranks=info.tp,
        parameters="\n".join(
            f'    "{node.target}": ({value_type(node).local_shape(rank)}, '
            f'"{storages[str(node.target)]}", "{parameter_of(node).describe(rank)}"),'
            for node in parameters(graph)
        ),
    )
    layers = [code.source(name, numbers) for code, (name, numbers) in classes.items()]
    module = _CLASS.format(
        rank=rank,
        parts="\n".join(_parts(graph, scope, calls)),
        inputs=", ".join(inputs),
        body="\n".join(_forward(steps, ends, scope)),
    )
    return "".join([header, *layers, module])


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


def _outer_names(sections: Sequence[Section], graph: fx.Graph) -> dict[fx.Node, str]:
    """Name the results of layers by their role, unless a value with that name is read later."""
    place = {node: number for number, section in enumerate(sections) for node in section.nodes}
    taken = {node.name for node in graph.nodes if origin_of(node).layer is None}
    last_read: dict[str, int] = {}
    found: dict[fx.Node, str] = {}
    for number, section in enumerate(sections):
        for node in section.writes if section.layer is not None else ():
            name = base_name(node)
            if name in taken or last_read.get(name, number) > number:
                continue
            found[node] = name
            last_read[name] = max(place.get(user, len(sections)) for user in node.users)
    return found


def _classes(
    sections: Sequence[Section], codes: Sequence[LayerCode | None]
) -> dict[LayerCode, tuple[str, list[int]]]:
    """Return the name of each class and the layers that it stands for."""
    layers: dict[LayerCode, list[int]] = {}
    for section, code in zip(sections, codes, strict=True):
        if code is not None and section.layer is not None:
            layers.setdefault(code, []).append(section.layer)
    names: dict[LayerCode, tuple[str, list[int]]] = {}
    for code, numbers in layers.items():
        name = f"Layer{numbers[0]}" if len(layers) > 1 else "Layer"
        while any(name == other for other, _ in names.values()):
            name += "Rest"
        names[code] = name, numbers
    return names


def _call(section: Section, name: str, scope: Scope) -> _Call:
    assert section.layer is not None
    results, arguments = (
        ", ".join(map(scope.name, nodes)) for nodes in (section.writes, section.reads)
    )
    return _Call(section.layer, name, results, arguments)


def _parts(graph: fx.Graph, scope: Scope, calls: Sequence[_Call]) -> Iterator[str]:
    """Yield the lines that register the parameters outside of the layers, and the layers."""
    outside = [
        node
        for node in parameters(graph)
        if any(origin_of(user).layer is None for user in node.users)
    ]
    if outside:
        yield from registering([str(node.target) for node in outside], "parameters[name]")
    yield from reordering(outside, scope)
    if not calls:
        return
    yield "        self.layers = torch.nn.ModuleList("
    yield "            ["
    for name, run in groupby(calls, key=lambda call: call.name):
        numbers = [call.layer for call in run]
        if len(numbers) == 1:
            yield f"                {name}({numbers[0]}, parameters, group),"
            continue
        whole = list(range(numbers[0], numbers[-1] + 1)) == numbers
        shown = f"range({numbers[0]}, {numbers[-1] + 1})" if whole else f"{numbers}"
        yield f"                *({name}(layer, parameters, group) for layer in {shown}),"
    yield "            ]"
    yield "        )"


def _forward(steps: Sequence[Section | _Call], ends: Sequence[_End], scope: Scope) -> Iterator[str]:
    calls = sum(isinstance(step, _Call) for step in steps)
    done = 0
    for key, run in groupby(steps, key=_statement):
        several = list(run)
        if key is None:
            for section in several:
                assert isinstance(section, Section)
                yield from statements(section.nodes, scope)
            continue
        results, arguments = key
        if len(several) == 1:
            yield f"        {results} = self.layers[{done}]({arguments})"
        else:
            last = done + len(several)
            which = f"[{done or ''}:{last if last < calls else ''}]".replace("[:]", "")
            yield f"        for layer in self.layers{which}:"
            yield f"            {results} = layer({arguments})"
        done += len(several)
    for end in reversed(ends[1:]):
        yield f'        if output == "{end.name}":'
        yield from (f"    {line}" for line in statements(end.nodes, scope))
        yield f"            return {scope.text(end.result)}"
    yield from statements(ends[0].nodes, scope)
    yield f"        return {scope.text(ends[0].result)}"


def _statement(step: Section | _Call) -> tuple[str, str] | None:
    """Return the results and arguments of a call; calls that agree in both make one loop."""
    return (step.results, step.arguments) if isinstance(step, _Call) else None
