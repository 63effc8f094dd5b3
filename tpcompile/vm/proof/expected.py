"""The values that a decode graph computes on each rank, as terms: its program must make them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.format import Format
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import operand, parameter_of, value_type
from tpcompile.ir.ops import (
    ADD_RESIDUAL,
    ALL_REDUCE,
    ALL_REDUCE_RESIDUAL,
    ARGMAX,
    ROTARY,
    SPECS,
    arguments_of,
)
from tpcompile.ir.ops.argmax import first_column
from tpcompile.ir.ops.cache import HEADS
from tpcompile.ir.ops.resumed import STATE_HEADS, TAIL_CHANNELS
from tpcompile.ir.recipe import Recipe
from tpcompile.ir.simulate import local_args
from tpcompile.ir.types import REPLICATE
from tpcompile.vm.groups.kv import side
from tpcompile.vm.program import Buffer, Role
from tpcompile.vm.program.buffer import STORED_DIMS
from tpcompile.vm.program.meaning import Part
from tpcompile.vm.proof.opened import Opened
from tpcompile.vm.proof.terms import TOKENS, Term, Terms


class Output(NamedTuple):
    """A value that a step must leave in the buffer of a role."""

    rank: int
    role: Role
    part: tuple[Part, ...]
    value: Term
    name: str


NEXT = {
    "tokens": Role.TOKENS,
    "positions": Role.POSITIONS,
    "lengths": Role.LENGTHS,
    "finished": Role.FINISHED,
    "clock": Role.CLOCK,
    "history": Role.HISTORY,
}
"""The state of the sequences that a step advances once it has chosen tokens."""
ADVANCED = ("positions", "lengths", "finished", "clock")
"""The parts of it that the next state depends on, beside the stop tokens."""
_INPUTS = {"input_ids": "tokens"}
"""The inputs of a graph whose buffers have another name."""


@dataclass(frozen=True)
class Weight:
    """A rank's part of a parameter. Two are the same if checkpoint tensors are read alike."""

    recipe: Recipe
    stored: Format
    name: str = field(compare=False)

    def __str__(self) -> str:
        return self.name


class Expected:
    """The terms of a graph's values on each rank."""

    def __init__(self, gm: fx.GraphModule, terms: Terms) -> None:
        self.terms = terms
        self.ranks = info_of(gm).tp
        self.names: dict[Term, str] = {}
        """The nodes of values, for messages."""
        self._gm = gm
        self._opened = [Opened(terms) for _ in range(self.ranks)]
        self._values: dict[fx.Node, list[Any]] = {}
        self._weights: dict[tuple[fx.Node, int], Term] = {}
        self._inputs = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
        self._parameters = {str(n.target): n for n in gm.graph.nodes if n.op == "get_attr"}
        for node in gm.graph.nodes:
            if node.op != "output":
                self._values[node] = self._terms_of(node)
                for value in self._values[node]:
                    if isinstance(value, Term):
                        self.names.setdefault(value, f"%{node.name}")
        self.outputs = self._outputs()
        """The values that a step must leave in buffers; [] if the graph chooses no tokens."""
        for output in self.outputs:
            self.names.setdefault(output.value, f"{output.name} on rank {output.rank}")

    def input(self, name: str) -> Term:
        """Return the term of an input that is the same on every rank."""
        return self.terms.call("input", name)

    def layer_of(self, name: str, layer: Any, rank: int) -> Term:
        """Return the term of a layer's states before a step."""
        rank_args = () if self._inputs[name].meta["type"].placement == REPLICATE else (rank,)
        return self.terms.call("layer of", self.terms.call("input", name, *rank_args), layer)

    def parameter(self, name: str, rank: int) -> Term | None:
        """Return the term of a rank's part of a parameter; None if the graph has none so named."""
        node = self._parameters.get(name)
        return None if node is None else self._parameter(node, rank)

    def misfit(self, buffer: Buffer) -> str:
        """Describe the expected buffer of weights or states; return "" if it is this buffer."""
        if buffer.role == Role.WEIGHT:
            node = self._parameters.get(buffer.name)
        elif buffer.role in STORED_DIMS:
            node = self._inputs.get(buffer.role.word)
        else:
            return ""
        if node is None:
            return f"a {buffer.role.word} of the graph"
        wanted = self._weight(node, buffer) if buffer.role == Role.WEIGHT else _state(node, buffer)
        return "" if buffer == wanted else str(wanted)

    def _weight(self, node: fx.Node, buffer: Buffer) -> Buffer:
        kind = value_type(node)
        shape = tuple(map(int, kind.local_shape(buffer.rank)))
        if len(shape) > len(buffer.shape) > 1:  # experts, one after the other
            shape = (shape[0] * shape[1], *shape[2:])
        first = kind.columns(buffer.rank)[0] if kind.format else 0
        dtype = kind.stored.values.dtype.torch
        return replace(buffer, shape=shape, dtype=dtype, format=kind.format, first=first)

    def _outputs(self) -> list[Output]:
        chosen = next((n for n in self._gm.graph.nodes if n.target == ARGMAX), None)
        if chosen is None:
            return []
        logits = self._values[operand(chosen)]
        outputs = []
        for rank in range(self.ranks):
            outputs.append(Output(rank, Role.LOGITS, (), logits[rank], "the logits"))
            outputs += self._advanced(rank, self._values[chosen][rank])
            outputs += self._stored(rank)
        return outputs

    def _advanced(self, rank: int, chosen: Term) -> list[Output]:
        read = [self.input(name) for name in (*ADVANCED, "stops")]
        return [
            Output(rank, role, (), self.terms.call(f"next {name}", chosen, *read), f"the {name}")
            for name, role in NEXT.items()
        ]

    def _stored(self, rank: int) -> list[Output]:
        """Return the keys, values and states that a step stores."""
        outputs: list[Output] = []
        for (name, layer), value in self._opened[rank].stored.items():
            if name == "cache":
                for part, new in enumerate(value.args[1:]):
                    description = f"the {('keys', 'values')[part]} of cache layer {layer}"
                    outputs.append(Output(rank, Role.CACHE, side(layer, part), new, description))
            else:
                description = f"the {name} of layer {layer}"
                outputs.append(Output(rank, Role[name.upper()], (layer,), value, description))
        return outputs

    def _terms_of(self, node: fx.Node) -> list[Any]:
        """Return the terms of a node by rank."""
        if node.op == "placeholder":
            return [self._input(node, rank) for rank in range(self.ranks)]
        if node.op == "get_attr":
            return [self._parameter(node, rank) for rank in range(self.ranks)]
        if node.target == ROTARY:
            return [self._tables(node)] * self.ranks
        if SPECS[node.target].across is not None:
            return self._across(node)
        return [self._called(node, rank) for rank in range(self.ranks)]

    def _input(self, node: fx.Node, rank: int) -> Term:
        kind, name = value_type(node), _INPUTS.get(node.name, node.name)
        rank_args = () if kind.placement == REPLICATE else (rank,)
        return self.terms.call("input", name, *rank_args, shape=kind.local_shape(rank))

    def _parameter(self, node: fx.Node, rank: int) -> Term:
        if (node, rank) not in self._weights:
            parameter = parameter_of(node)
            weight = Weight(parameter.shards[rank], parameter.type.stored, str(node.target))
            shape = tuple(map(int, parameter.type.local_shape(rank)))
            self._weights[node, rank] = self.terms.call("weight", weight, shape=shape)
        return self._weights[node, rank]

    def _called(self, node: fx.Node, rank: int) -> Any:
        args = arguments_of(node)
        local = {name: self._local(arg, rank) for name, arg in args.items()}
        if node.target is operator.getitem:
            source, index = self._local(node.args[0], rank), node.args[1]
            assert isinstance(index, int)
            return source[index] if isinstance(source, tuple) else source
        local |= local_args(node, SPECS[node.target], rank)
        return self._opened[rank].called(node.target, tuple(local.values()))

    def _local(self, arg: Any, rank: int) -> Any:
        if isinstance(arg, fx.Node):
            return self._values[arg][rank]
        if isinstance(arg, list | tuple):
            return tuple(self._local(item, rank) for item in arg)
        return arg

    def _tables(self, node: fx.Node) -> tuple[Term, ...]:
        """Return the rows of the rotation tables at the positions of a step."""
        bound = arguments_of(node)
        positions, width = self._local(bound["positions"], 0), bound["width"]
        shape = (TOKENS, width)
        return tuple(
            self.terms.call("rows", self.table(name, width, bound["dtype"]), positions, shape=shape)
            for name in ("cos", "sin")
        )

    def table(self, name: str, width: int, dtype: torch.dtype) -> Term:
        """Return the term of a rotation table of all positions."""
        return self.terms.call("input", name, width, dtype_name(dtype))

    def _across(self, node: fx.Node) -> list[Any]:
        """Return the results of a collective."""
        first, *remaining = arguments_of(node).values()
        parts = self._values[first]
        if node.target == ARGMAX:
            kind = value_type(first)
            firsts = [first_column(kind, rank) for rank in range(self.ranks)]
            return [self.terms.argmax(zip(parts, firsts, strict=True))] * self.ranks
        if node.target == ALL_REDUCE:
            return [self.terms.total(*parts)] * self.ranks
        if node.target == ALL_REDUCE_RESIDUAL:
            bound = arguments_of(node)
            return [self._summed(parts, bound, rank) for rank in range(self.ranks)]
        constants = [arg for arg in remaining if not isinstance(arg, fx.Node)]
        return [self.terms.call(SPECS[node.target].name, *parts, *constants)] * self.ranks

    def _summed(self, parts: Sequence[Term], bound: dict[str, Any], rank: int) -> Term:
        residual, bias = (self._local(bound.get(name), rank) for name in ("residual", "bias"))
        total = self.terms.total(*parts, *(() if bias is None else (bias,)))
        summed: Term = self._opened[rank].called(ADD_RESIDUAL, (total, residual))
        return summed


def _state(node: fx.Node, buffer: Buffer) -> Buffer:
    """Return a buffer of the cache or of states with the layers and the shape of a graph's."""
    kind, stored = value_type(node), list(buffer.storage or ())
    local = kind.local_shape(buffer.rank)
    for dim, extent in enumerate(local):
        if isinstance(extent, int) and dim < len(stored):
            stored[dim] = extent
    batch = buffer.shape[_BATCH[buffer.role]] if len(buffer.shape) > 1 else 0
    heads = local[_HEADS[buffer.role]]
    shape = (
        (local[0], 2, batch, heads, 2) if buffer.role == Role.CACHE else (local[0], batch, heads)
    )
    return replace(
        buffer,
        shape=tuple(map(int, shape)),
        storage=tuple(stored),
        dtype=kind.stored.values.dtype.torch,
        format=kind.format,
    )


_BATCH = {Role.CACHE: 2, Role.TAILS: 1, Role.STATES: 1}
"""The dimension of the rows in the regions of a buffer."""
_HEADS = {Role.CACHE: HEADS, Role.TAILS: TAIL_CHANNELS, Role.STATES: STATE_HEADS}
"""The dimension of the heads or channels in memory."""
