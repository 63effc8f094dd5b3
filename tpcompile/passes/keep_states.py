"""Pass `keep-states`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from tpcompile.errors import PassError
from tpcompile.ir.meta import origin_of, value_type
from tpcompile.ir.ops import (
    CAUSAL_CONV,
    GATED_DELTA_RULE,
    RESUMED_CONV,
    RESUMED_DELTA_RULE,
    arguments_of,
)
from tpcompile.ir.ops.resumed import STATE_HEADS, TAIL_CHANNELS
from tpcompile.ir.roles import StatesOf
from tpcompile.ir.types import ValueType
from tpcompile.ir.values.recurrent import FROM_THE_START
from tpcompile.ir.values.scope import Rewrite
from tpcompile.passes.cache_kv import common_type
from tpcompile.rewriting.rewrite import Report, calls, insert_bound, insert_input, replace

TAILS = "tails"
"""The input with the last inputs of all convolutions, for the rank's channels."""
STATES = "states"
"""The input with the matrices of all delta rules, for the rank's value heads."""


@dataclass(frozen=True)
class KeepStates:
    """Let linear attention resume from the states of sequences, which become inputs of the graph.

    Run it after cache-kv, and after every pass that shards the graph or looks for linear attention.

                                             f32[layers, S, heads, width, width] %states, like %v
        %o = gated_delta_rule(%q, %k, %v,    i64[N] %read, i64[N] %write
                              %starts, …) →  %o = resumed_delta_rule(%q, %k, %v, %states, %starts,
                                                                     %lengths, %read, %write, …)
    """

    name: ClassVar[str] = "keep-states"
    after: ClassVar[tuple[str, ...]] = ("canonicalize", "raise-gates", "cache-kv")
    rewrites: ClassVar[tuple[Rewrite, ...]] = (FROM_THE_START,)

    def apply(self, gm: fx.GraphModule) -> Report:
        nodes_by_target = {target: calls(gm, target) for target, *_ in _RESUMED_OPS}
        first = next((node for nodes in nodes_by_target.values() for node in nodes), None)
        if first is None:
            return Report()
        lengths = next((n for n in gm.graph.nodes if n.name == "lengths"), None)
        if lengths is None or lengths.op != "placeholder":
            raise PassError(
                "Linear attention cannot keep its states without the lengths of sequences",
                where=str(origin_of(first)),
                expected="a graph with attention, which cache-kv has given a cache",
                hint="Put keep-states after cache-kv",
            )
        kind = value_type(lengths)
        numbers = {name: insert_input(lengths, name, kind) for name in ("write", "read")}
        matches = 0
        for target, resumed, name, state in _RESUMED_OPS:
            nodes = nodes_by_target[target]
            if not nodes:
                continue
            kinds = {node: state(node, len(nodes)) for node in nodes}
            states = insert_input(lengths, name, common_type("states", kinds))
            for layer, node in enumerate(nodes):
                bound = {**arguments_of(node), **numbers, "lengths": lengths, name: states}
                with gm.graph.inserting_before(node):
                    new = insert_bound(node, resumed, {**bound, "layer": layer})
                replace(node, new)
                gm.graph.erase_node(node)
            matches += len(nodes)
        return Report(matches=matches)


def _tails(node: fx.Node, layers: int) -> ValueType:
    x, weight = (value_type(arguments_of(node)[name]) for name in ("x", "weight"))
    kind = ValueType((layers, "K", weight.extent(2) - 1, x.shape[-1]), x.dtype, role=StatesOf())
    layout = x.layout_of(-1)
    return kind if layout is None else kind.sharded(TAIL_CHANNELS, layout)


def _states(node: fx.Node, layers: int) -> ValueType:
    k, v = (value_type(arguments_of(node)[name]) for name in "kv")
    shape = (layers, "K", v.shape[-2], k.shape[-1], v.shape[-1])
    kind = ValueType(shape, torch.float32, role=StatesOf())
    layout = v.layout_of(-2)
    return kind if layout is None else kind.sharded(STATE_HEADS, layout)


_RESUMED_OPS: tuple[tuple[Any, Any, str, Callable[[fx.Node, int], ValueType]], ...] = (
    (CAUSAL_CONV, RESUMED_CONV, TAILS, _tails),
    (GATED_DELTA_RULE, RESUMED_DELTA_RULE, STATES, _states),
)
