"""A program under construction: buffers by name, and the buffer of each graph value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tpcompile.errors import UnsupportedError
from tpcompile.ir.format import Format
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import origin_of, value_type
from tpcompile.ir.ops import NORM_EXPERTS
from tpcompile.ir.ops.spec import SPECS, arguments_of
from tpcompile.ir.simulate import local_args
from tpcompile.ir.text import format_node
from tpcompile.vm.lowering.plan import StepPlan
from tpcompile.vm.program import Buffer, Role
from tpcompile.vm.program.instruction import NONE, StepInstruction


class Building:
    """A program under construction. Buffers are numbered as declared, one per rank and name."""

    def __init__(self, gm: fx.GraphModule, plan: StepPlan) -> None:
        self.gm, self.plan = gm, plan
        self.ranks = info_of(gm).tp
        self.buffers: list[Buffer] = []
        self.instructions: list[StepInstruction] = []
        self._numbers: dict[str, int] = {}
        self._places: dict[fx.Node, int] = {}

    def declare(
        self,
        name: str,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        role: Role = Role.SCRATCH,
        storages: Sequence[tuple[int, ...]] | None = None,
        stored: Format | None = None,
        firsts: Sequence[int] = (),
    ) -> int:
        """Return the number of rank 0's buffer of this name. Declare it if it is new."""
        storage_shapes: Sequence[tuple[int, ...] | None] = storages or [None] * self.ranks
        per_rank = zip(shapes, storage_shapes, firsts or [0] * self.ranks, strict=True)
        wanted = [
            Buffer(name, shape, dtype, rank, role, storage, stored, first)
            for rank, (shape, storage, first) in enumerate(per_rank)
        ]
        if name not in self._numbers:
            self._numbers[name] = len(self.buffers)
            self.buffers += wanted
        first = self._numbers[name]
        declared = self.buffers[first : first + self.ranks]
        for buffer, before in zip(wanted, declared, strict=True):
            if buffer != before:
                raise UnsupportedError(
                    f"All layers must declare the buffer {name} alike",
                    got=str(buffer),
                    expected=f"{before}, as before",
                )
        return first

    def deal(self, blocks: Iterable[StepInstruction]) -> None:
        """Append the blocks of a phase, which are in the order of their weights in memory.

        Workers that share a queue take blocks in turn. The order of the instructions is such that
        a worker's blocks are then neighbours, so it loads one stream of weights.
        """
        instructions = list(blocks)
        turns = -(-len(instructions) // self.plan.workers)
        for turn in range(turns):
            self.instructions += instructions[turn::turns]

    def number(self, name: str) -> int:
        """Return the number of rank 0's buffer of a declared name."""
        return self._numbers[name]

    def alike(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Declare a scratch buffer that has the same shape on every rank."""
        return self.declare(name, [shape] * self.ranks, dtype)

    def sole(self, role: Role, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> int:
        """Declare the buffer of this role on every rank; its name is that of the role."""
        return self.declare(role.word, [shape] * self.ranks, dtype, role)

    def local_columns(self, node: fx.Node) -> list[int]:
        """Return the width of a value on each rank, with heads side by side."""
        kind = value_type(node)
        dims = range(1, kind.dims)
        return [
            math.prod(kind.local_extent(rank, dim) for dim in dims) for rank in range(self.ranks)
        ]

    def put(self, node: fx.Node, number: int) -> None:
        """Record rank 0's buffer of a value. The next numbers are its buffers on other ranks."""
        self._places[node] = number

    def buffer(self, node: fx.Node, rank: int) -> int:
        """Return the buffer of a value or a parameter on a rank."""
        if node.op == "get_attr":
            return self._parameter(node) + rank
        if node not in self._places:
            raise self.refusal(node, "its value has no buffer")
        return self._places[node] + rank

    def buffer_if(self, node: fx.Node | None, rank: int) -> int:
        """Return the buffer of an optional value or parameter, or NONE if it is absent."""
        return NONE if node is None else self.buffer(node, rank)

    def bound(self, node: fx.Node, rank: int = 0) -> dict[str, Any]:
        """Return the arguments of a node by name, with this rank's value if they differ by rank."""
        return {**arguments_of(node), **local_args(node, SPECS[node.target], rank)}

    def refusal(self, node: fx.Node, reason: str, hint: str = "") -> UnsupportedError:
        return UnsupportedError(
            "The graph cannot be lowered to a program",
            where=f"{node.name}, {origin_of(node)}",
            got=f"{format_node(node).strip()}: {reason}",
            expected="a graph of the decode pipeline's instruction groups",
            hint=hint or "Use the decode pipeline, and look for the fusion that failed in its dump",
        )

    def _parameter(self, node: fx.Node) -> int:
        kind = value_type(node)
        shapes = [tuple(map(int, kind.local_shape(rank))) for rank in range(self.ranks)]
        if any(user.target is NORM_EXPERTS for user in node.users) and kind.dims > 2:
            shapes = [(experts * rows, columns) for experts, rows, columns in shapes]
        dtype, stored = kind.stored.values.dtype.torch, kind.format
        firsts = [kind.columns(rank)[0] if stored else 0 for rank in range(self.ranks)]
        name = str(node.target)
        return self.declare(name, shapes, dtype, Role.WEIGHT, stored=stored, firsts=firsts)


def width_of(node: fx.Node) -> int:
    """Return the last dimension of a value."""
    return value_type(node).extent(-1)


def layer_of(node: fx.Node) -> int:
    """Return the layer that a node comes from, or -1 outside the layers."""
    layer = origin_of(node).layer
    return NONE if layer is None else layer
