"""The program on the reference machine, with every value that its instructions report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpcompile.backends.memory import StepMemory, rotation_of
from tpcompile.backends.reference import Machine
from tpcompile.backends.reference.orders import Order
from tpcompile.compare.groups import Group, Pieces, Side
from tpcompile.compare.program.module import put_cached
from tpcompile.compare.program.structure import Structure
from tpcompile.compare.program.texts import Texts
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import NONE, Probe, Range, StepInstruction


class ProgramSide:
    """A machine that starts with copies of caches that another side has filled."""

    def __init__(
        self,
        program: Program,
        structure: Structure,
        parameter: Callable[[int, str], torch.Tensor],
        rotary: Callable[..., Any],
        caches: Sequence[torch.Tensor],
        order: Order,
    ) -> None:
        self._structure = structure
        self._caches = [cache.clone() for cache in caches]
        rotation = rotation_of(program, rotary)
        self._machine = Machine(StepMemory(program, parameter, rotation, self._caches))
        self._order = order

    def step(self, texts: Texts, groups: Sequence[Group]) -> Side:
        """Run the new tokens, and collect all values that the instructions report."""
        pieces = Pieces("program", groups, len(self._caches))
        new = texts.new()
        self._machine.place(new["input_ids"], new["lengths"], texts.tables)
        self._machine.run(1, self._order, lambda instruction: _probe(pieces, instruction))
        for layer in self._structure.layers:
            put_cached(pieces, layer, self._caches, texts)
        return pieces.side()


def _probe(pieces: Pieces, instruction: StepInstruction) -> Probe:
    layer = None if instruction.layer == NONE else instruction.layer

    def show(name: str, sequences: Range, columns: Range, values: torch.Tensor) -> None:
        pieces.put(
            (name, layer),
            values,
            instruction.label,
            rank=instruction.rank,
            rows=sequences,
            columns=columns,
        )

    return show
