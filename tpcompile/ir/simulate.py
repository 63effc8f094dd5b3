"""Execution of a graph on simulated ranks: in one process, with one tensor per value and rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from tpcompile.ir.info import info_of
from tpcompile.ir.kv import nan_element, row_in_memory
from tpcompile.ir.meta import Parameter, operand, parameter_of, parameters, type_of, value_type
from tpcompile.ir.ops import CACHE_WRITERS, OpSpec, arguments_of, spec_of
from tpcompile.ir.ops.few_bits import RoundingWeight
from tpcompile.ir.pieces import Read, evaluate
from tpcompile.ir.recipe import Tensor, shape_of
from tpcompile.ir.roles import StatesOf
from tpcompile.ir.types import ValueType

Values = dict[fx.Node, list[Any]]
_DECODED_ROWS = 1024
"""The rows of a weight that are decoded at a time, which takes several times their memory."""


Weight = torch.Tensor | RoundingWeight


def materialise(gm: fx.GraphModule, read: Read) -> dict[str, list[Weight]]:
    """Return each rank's part of every parameter, by the target of the parameter's node."""
    return {
        str(node.target): [
            _weight(parameter_of(node), rank, read) for rank in range(info_of(gm).tp)
        ]
        for node in parameters(gm.graph)
    }


def _weight(parameter: Parameter, rank: int, read: Read) -> Weight:
    kind = parameter.type
    if kind.format is None or not kind.format.rounds:
        return _values(parameter, rank, read, kind.dtype)
    values = _values(parameter, rank, read, torch.float32)
    return RoundingWeight(values, kind.format, kind.columns(rank)[0], kind.dtype)


def _values(parameter: Parameter, rank: int, read: Read, dtype: torch.dtype) -> torch.Tensor:
    kind = parameter.type
    if kind.format is None:
        return evaluate(parameter.shards[rank], read).to(dtype)
    parts = {
        component.suffix: evaluate(recipe, read).flatten(0, -2)
        for component, recipe in parameter.components(rank)
    }
    columns, shape = kind.columns(rank), shape_of(parameter.shards[rank])
    decoded = torch.empty((math.prod(shape[:-1]), shape[-1]), dtype=dtype)
    for start in range(0, len(decoded), _DECODED_ROWS):
        block = slice(start, start + _DECODED_ROWS)
        block_parts = {suffix: part[block] for suffix, part in parts.items()}
        decoded[block] = kind.format.decoded(block_parts, columns, dtype)
    return decoded.view(shape)


def components(gm: fx.GraphModule, read: Read) -> dict[str, list[torch.Tensor]]:
    """Return each rank's components of the weights in a format, by the names that ranks use."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for node in parameters(gm.graph):
        parameter = parameter_of(node)
        for rank in range(info_of(gm).tp if parameter.type.format is not None else 0):
            for part, recipe in parameter.components(rank):
                tensors.setdefault(f"{node.target}{part.suffix}", []).append(evaluate(recipe, read))
    return tensors


def whole_value(tensor: Tensor, read: Read, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a whole weight of the checkpoint."""
    return _values(Parameter.replicated(tensor, dtype, 1), 0, read, dtype)


def run_ranks(
    gm: fx.GraphModule,
    inputs: Mapping[str, torch.Tensor],
    weights: Mapping[str, Sequence[Weight]],
    rotary: Callable[..., Any],
    instead: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
) -> Values:
    """Execute a graph, and return the value of every node on every rank.

    `instead` has functions that replace ops, by node or by target.
    """
    ranks = info_of(gm).tp
    dealt = rank_inputs(gm, inputs)
    values: Values = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = [local_inputs[node.name] for local_inputs in dealt]
        elif node.op == "get_attr":
            values[node] = list(weights[node.target])
        elif node.op == "output":
            values[node] = [_local(node.args[0], values, rank) for rank in range(ranks)]
        else:
            values[node] = _call(node, values, ranks, rotary, instead)
    return values


def run_streamed(
    gm: fx.GraphModule,
    inputs: Mapping[str, torch.Tensor],
    read: Read,
    rotary: Callable[..., Any],
) -> torch.Tensor:
    """Execute a graph of one rank and return its first result.

    Parameters are read when they are used, and values are freed after their last use.
    """
    (dealt,) = rank_inputs(gm, inputs)
    nodes = list(gm.graph.nodes)
    output = operand(nodes[-1])
    last = {operand: node for node in nodes for operand in node.all_input_nodes}
    values: Values = {}
    for node in nodes[:-1]:
        if node.op == "placeholder":
            values[node] = [dealt[node.name]]
        elif node.op == "call_function" or node.op == "call_module":
            for used in node.all_input_nodes:
                if used not in values:
                    values[used] = [_weight(parameter_of(used), 0, read)]
            values[node] = _call(node, values, 1, rotary, {})
            for used in node.all_input_nodes:
                if last[used] is node:
                    del values[used]
    return values[output][0]  # type: ignore[no-any-return]


def logits_of(values: Values) -> list[torch.Tensor]:
    """Return the first result of a graph on every rank."""
    output = next(node for node in values if node.op == "output")
    return values[operand(output)]


def rank_inputs(
    gm: fx.GraphModule, inputs: Mapping[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Return the inputs of each rank, including a cache and states if the graph has them.

    The sequences of `starts` are new. They get consecutive blocks of a cache, and states, all of
    which are filled with NaN.
    """
    ranks = range(info_of(gm).tp)
    writer = next((node for node in gm.graph.nodes if node.target in CACHE_WRITERS), None)
    bound = arguments_of(writer) if writer else {}
    if not bound or bound["cache"].op != "placeholder":
        return [dict(inputs) for _ in ranks]
    block, kind = bound["block"], value_type(bound["cache"])
    lengths = inputs["starts"].diff()
    held = lengths.add(block - 1).div(block, rounding_mode="floor").tolist()
    firsts = [sum(held[:sequence]) for sequence in range(len(held))]
    tables = torch.full((len(held), max(held)), -1)
    slots = []
    for row, (first, count, length) in enumerate(zip(firsts, held, lengths.tolist(), strict=True)):
        tables[row, :count] = torch.arange(first, first + count)
        slots.append(first * block + torch.arange(length))
    placed = {"slots": torch.cat(slots), "tables": tables, "lengths": lengths}
    count = sum(held) * block
    dealt = [{**inputs, **placed, "cache": empty_cache(kind, rank, count)} for rank in ranks]
    states = [node for node in gm.graph.nodes if node.op == "placeholder" and _holds_states(node)]
    for rank, local_inputs in enumerate(dealt if states else ()):
        local_inputs["read"] = local_inputs["write"] = torch.arange(len(held))
        local_inputs.update({n.name: empty_states(value_type(n), rank, len(held)) for n in states})
    return dealt


def _holds_states(node: fx.Node) -> bool:
    return isinstance(value_type(node).role, StatesOf)


def empty_states(kind: ValueType, rank: int, count: int) -> torch.Tensor:
    """Return a rank's states for a number of sequences, filled with NaN."""
    shape = [count if isinstance(extent, str) else extent for extent in kind.local_shape(rank)]
    return torch.full(shape, torch.nan, dtype=kind.dtype)


def empty_cache(kind: ValueType, rank: int, slots: int) -> torch.Tensor:
    """Return a rank's KV cache, filled with NaN."""
    shape = [slots if isinstance(extent, str) else extent for extent in kind.local_shape(rank)]
    shape[-1], dtype = row_in_memory(shape[-1], kind.dtype, kind.format)
    cache = torch.empty(shape, dtype=dtype)
    return cache.fill_(nan_element(cache))


def _call(
    node: fx.Node,
    values: Values,
    ranks: int,
    rotary: Callable[..., Any],
    instead: Mapping[Any, Callable[..., Any]],
) -> list[Any]:
    spec = spec_of(node)
    assert spec is not None, node
    if spec.across is not None:
        source, *operands = (arg for arg in arguments_of(node).values() if isinstance(arg, fx.Node))
        operand_values = [values[argument] for argument in operands]
        return list(spec.across(values[source], type_of(source), type_of(node), *operand_values))
    results = []
    for rank in range(ranks):
        args = [_local(arg, values, rank) for arg in node.args]
        if node.op == "call_module":
            results.append(rotary(*args))
        else:
            kwargs = {key: _local(arg, values, rank) for key, arg in node.kwargs.items()}
            bound = {**spec.bind(args, kwargs), **local_args(node, spec, rank)}
            other = instead.get(node) or instead.get(node.target)
            results.append(spec.call(bound) if other is None else other(**bound))
    return results


def local_args(node: fx.Node, spec: OpSpec, rank: int) -> dict[str, Any]:
    """Return the arguments that are global in the graph but differ on each rank."""
    if spec.localize is None:
        return {}
    types = {name: _types(arg) for name, arg in arguments_of(node).items()}
    return spec.localize(type_of(node), rank, **types)


def _types(arg: Any) -> Any:
    return type_of(arg) if isinstance(arg, fx.Node) else arg


def _local(arg: Any, values: Values, rank: int) -> Any:
    if isinstance(arg, fx.Node):
        return values[arg][rank]
    if isinstance(arg, list | tuple):
        return [_local(item, values, rank) for item in arg]
    return arg
