"""The layers of a rank's graph as classes: layers with the same code share one class."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, groupby

import torch
from torch import fx

from tpcompile.alike import runs_of
from tpcompile.backends.torch_tp.expressions import AS_MATRIX, ROUTER, Scope, statements
from tpcompile.backends.torch_tp.storage import Storage, Storages
from tpcompile.ir.meta import operand, origin_of, value_type
from tpcompile.ir.names import base_name, prefix_of, short_name
from tpcompile.ir.ops import TOP_EXPERTS, arguments_of, spec_of

_CLASS = '''

class {name}(torch.nn.Module):
    """{whose}."""

    def __init__(self, {numbers}, parameters, group):
        super().__init__()
{assigned}
        self.group = group
{parameters}

    def forward(self, {takes}):
{body}
        return {gives}
'''

_ATTRIBUTES = frozenset((*dir(torch.nn.Module()), "layer", "kept", "group", ROUTER))
"""The attributes of a layer's module that are not parameters."""


@dataclass(frozen=True)
class Section:
    """Consecutive nodes of one layer, or of no layer."""

    layer: int | None
    nodes: Sequence[fx.Node]
    reads: Sequence[fx.Node]
    """The values from elsewhere, in the order in which they are read."""
    writes: Sequence[fx.Node]
    """The values that others read."""


def sections_of(graph: fx.Graph, apart: Collection[fx.Node]) -> list[Section]:
    """Split the computation into sections; nodes in `apart` belong to none."""
    nodes = [n for n in graph.nodes if n.op.startswith("call") and n not in apart]
    sections = []
    for layer, run in groupby(nodes, key=lambda node: origin_of(_maker(node)).layer):
        members = list(run)
        inside = set(members)
        values = (n for node in members for n in node.all_input_nodes if n.op != "get_attr")
        reads = dict.fromkeys(n for n in values if n not in inside)
        writes = [node for node in members if any(user not in inside for user in node.users)]
        sections.append(Section(layer, members, list(reads), writes))
    return sections


def _maker(node: fx.Node) -> fx.Node:
    """Return the op whose call binds a value: for an item, the op that has several results."""
    return operand(node) if node.target is operator.getitem else node


@dataclass(frozen=True)
class LayerCode:
    """The code of a layer on a rank, without the number of the layer."""

    parameters: tuple[str, ...]
    takes: tuple[str, ...]
    body: tuple[str, ...]
    gives: tuple[str, ...]
    numbers: tuple[str, ...]
    """The numbers of a layer by which its class is made."""

    def source(self, name: str, layers: Sequence[int]) -> str:
        """Return the class of these layers."""
        return _CLASS.format(
            name=name,
            whose=_spoken(layers),
            numbers=", ".join(self.numbers),
            assigned="\n".join(f"        self.{name} = {name}" for name in self.numbers),
            parameters="\n".join(self.parameters),
            takes=", ".join(self.takes),
            body="\n".join(self.body),
            gives=", ".join(self.gives),
        )


def kept_numbers(graph: fx.Graph) -> dict[int, int]:
    """Return the number of each layer among the layers that have states of its kind.

    It is empty if these are the numbers of the layers themselves.
    """
    numbers = {
        layer: int(arguments_of(node)["layer"])
        for node in graph.nodes
        if (spec := spec_of(node)) and "layer" in spec.argument_names
        if (layer := origin_of(node).layer) is not None
    }
    return {} if all(layer == number for layer, number in numbers.items()) else numbers


def layer_codes(
    section: Section, ranks: int, storages: Storages, state_numbers: Mapping[int, int]
) -> list[LayerCode]:
    """Return the code of a section that is in a layer, for each rank.

    `state_numbers` are those of layers among those with states of their kind.
    """
    names = _short_names(section.nodes)
    takes = _names_of_reads(section, names)
    read = (n for node in section.nodes for n in node.all_input_nodes if n.op == "get_attr")
    parameters = list(dict.fromkeys(read))
    parameter_names = _short_names(parameters, _ATTRIBUTES)
    assert section.layer is not None
    number = state_numbers.get(section.layer)
    scope = Scope(ranks, storages, {**names, **takes, **parameter_names}, section.layer, number)
    registered = (*_registering(parameters, scope), *_routers(section.nodes))
    lines = list(statements(section.nodes, scope))
    gives = tuple(names[node] for node in section.writes)
    return [
        LayerCode(
            registered,
            tuple(takes.values()),
            tuple(line[rank] for line in lines),
            gives,
            ("layer",) if number is None else ("layer", "kept"),
        )
        for rank in range(ranks)
    ]


def _short_names(nodes: Iterable[fx.Node], taken: Iterable[str] = ()) -> dict[fx.Node, str]:
    """Return the names of nodes without their layer, or the whole name if that one is taken."""
    names: dict[fx.Node, str] = {}
    used = set(taken)
    for node in nodes:
        name = short_name(node)
        if name in used:
            name = str(node.target) if node.op == "get_attr" else node.name
        names[node] = name
        used.add(name)
    return names


def _names_of_reads(section: Section, names: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Name the values from elsewhere by their role, without the layer that they come from.

    A value of the layer may take over such a name once nothing reads the other value any more.
    """
    places = {node: place for place, node in enumerate(section.nodes)}
    bound: dict[str, int] = {}
    for node in section.nodes:
        bound.setdefault(names[node], places.get(_maker(node), places[node]))
    read_names: dict[fx.Node, str] = {}
    for node in section.reads:
        last = max(places[user] for user in node.users if user in places)
        wanted = base_name(node), short_name(node), node.name
        numbered = (f"{node.name}_{number}" for number in count(1))
        read_names[node] = next(
            name
            for name in chain(wanted, numbered)
            if name not in read_names.values() and last <= bound.get(name, last)
        )
    return read_names


def _registering(parameters: Sequence[fx.Node], scope: Scope) -> Iterator[str]:
    """Yield the lines that register the parameters of a layer."""
    names = {
        f"{node.target}{part.suffix}": name
        for node in parameters
        for part, name in zip(
            value_type(node).stored.components, scope.components(node), strict=True
        )
    }
    prefix = prefix_of(scope.layer)
    prefixed = [name for target, name in names.items() if target == prefix + name]
    targets = [target for target, name in names.items() if target != prefix + name]
    if prefixed:
        yield from registering(prefixed, 'parameters[f"l{layer}_{name}"]')
    if targets:
        yield from registering(targets, "parameters[name]")
    yield from reordering(parameters, scope)


def _routers(nodes: Sequence[fx.Node]) -> Iterator[str]:
    """Yield the line that makes the router of a mixture of experts."""
    if any(node.target is TOP_EXPERTS for node in nodes):
        yield f"        self.{ROUTER} = tpc.Router()"


def registering(names: Sequence[str], value: str) -> Iterator[str]:
    """Yield the lines that register parameters, each the `value` of its name."""
    yield "        for name in ("
    yield from (f'            "{name}",' for name in names)
    yield "        ):"
    yield f"            value = {value}"
    yield "            self.register_parameter(name, torch.nn.Parameter(value, False))"


def reordering(parameters: Sequence[fx.Node], scope: Scope) -> Iterator[str]:
    """Yield the lines that reorder the parameters that are also stored row by row."""
    for node in parameters:
        if scope.storages[str(node.target)] is Storage.BOTH:
            name = scope.parameter(node)
            yield f"        self.{name}{AS_MATRIX} = tpc.as_matrix(self.{name})"


def _spoken(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"Layer {layers[0]}"
    if len(runs_of(layers)) == 1:
        return f"Layers {layers[0]} to {layers[-1]}"
    return f"Layers {', '.join(map(str, layers))}"
