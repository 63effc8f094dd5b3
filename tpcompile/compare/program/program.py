"""The program on an executor, with every value that its instructions report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tpcompile.backends.executor import Executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference.orders import Order
from tpcompile.backends.rotation import rotation_of
from tpcompile.compare.agreement import same_bits
from tpcompile.compare.group_rows import LOGITS
from tpcompile.compare.groups import Group, Pieces, Side
from tpcompile.compare.program.layers import AttentionLayer, DeltaLayer
from tpcompile.compare.program.module import put_kept
from tpcompile.compare.program.structure import Structure
from tpcompile.compare.program.texts import Texts
from tpcompile.compare.routing import Experts
from tpcompile.ir.ops.experts import Routed, replayed, same_experts
from tpcompile.vm.groups import (
    AttentionReduce,
    DeltaStep,
    NormQkvRopeAppend,
    NormQkvRows,
    PartialAttention,
    TopExperts,
)
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.buffer import LINEAR_STATES
from tpcompile.vm.program.instruction import NONE, Probe, Range, StepInstruction, unseen

_NOT_STORED = frozenset(
    (
        *("norm", "q", "k", "v", "q_normed", "k_normed", "k_rotated", "ungated"),
        *("q_conv", "k_conv", "v_conv", "decay", "beta", "delta_rule"),
        *("mlp_norm", "final_norm"),
    )
)
"""The values that instructions compute and do not store."""


@dataclass(frozen=True)
class Start:
    """A program, its weights, and the caches and states that another side has filled."""

    program: Program
    structure: Structure
    parameter: Callable[[int, str], torch.Tensor]
    rotary: Callable[..., Any]
    caches: Sequence[torch.Tensor]
    states: Sequence[Mapping[str, torch.Tensor]]

    def memory(self) -> StepMemory:
        """Return memory with copies of the caches and states."""
        rotation = rotation_of(self.program, self.rotary)
        caches = [cache.clone() for cache in self.caches]
        states = [
            {name: state.clone() for name, state in rank_states.items()}
            for rank_states in self.states
        ]
        return StepMemory(self.program, self.parameter, rotation, caches, states)


class ProgramSide:
    """An executor that runs a program instruction by instruction, in some order."""

    def __init__(self, start: Start, kind: type[Executor], order: Order) -> None:
        self.name, self._start, self._order = "program", start, order
        self._memory = start.memory()
        self._executor = kind(self._memory)

    def step(self, texts: Texts, groups: Sequence[Group], experts: Experts) -> Side:
        """Run the new tokens, and collect all values that the instructions report.

        `experts` are those of each sequence. They replace those in memory once they are chosen.
        """
        return self._observed(texts, groups, experts).side()

    def _observed(self, texts: Texts, groups: Sequence[Group], experts: Experts) -> Pieces:
        program = self._start.program
        pieces = Pieces(self.name, groups, program.ranks)
        _place(self._executor, texts)
        turns = self._replaying(self._order(program), experts)
        self._executor.observe(turns, lambda instruction: self._probe(pieces, instruction))
        caches, states = self._memory.values(Role.CACHE), self._states
        put_kept(pieces, self._start.structure, caches, states, texts)
        return pieces

    def _replaying(self, turns: Iterable[int], experts: Experts) -> Iterator[int]:
        """Yield instructions; after each choice of experts, write the given one."""
        for number in turns:
            yield number
            instruction = self._start.program.instructions[number]
            if isinstance(instruction, TopExperts):
                layer = _layer_of(self._start.structure, instruction)
                assert layer is not None
                _replay(self._memory.tensors, instruction, experts[layer][instruction.sequence])

    @property
    def _states(self) -> list[dict[str, torch.Tensor]]:
        """The states of each rank by name, if the program has any."""
        roles = self._start.program.roles.intersection(LINEAR_STATES)
        return [
            {role.word: self._memory.values(role)[rank] for role in roles}
            for rank in range(self._start.program.ranks)
        ]

    def _probe(self, pieces: Pieces, instruction: StepInstruction) -> Probe:
        layer = _layer_of(self._start.structure, instruction)

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

    def close(self) -> None:
        """Release the executor."""
        self._executor.close()


class LaunchedSide(ProgramSide):
    """An executor that launches each step, and need not report values that it does not store.

    The launch, on a second executor, must compute the same logits, bit by bit.
    """

    def __init__(self, start: Start, kind: type[Executor], order: Order) -> None:
        super().__init__(start, kind, order)
        self.name = kind.name
        self._launched = kind(start.memory())
        routes = any(
            isinstance(instruction, TopExperts) for instruction in start.program.instructions
        )
        self._free = kind(start.memory()) if routes else None
        """An executor that chooses experts itself, as a launch does; both must have equal logits.

        None if the program has no routers."""

    def step(self, texts: Texts, groups: Sequence[Group], experts: Experts) -> Side:
        """Run the new tokens once more as a launch, and collect the values of both runs."""
        twice = [
            replace(group, recomputed=True) if group.key == LOGITS else group for group in groups
        ]
        pieces = self._observed(texts, twice, experts)
        _place(self._launched, texts)
        self._launched.run(1)
        with torch.inference_mode():
            launched = self._launched.logits
            if self._free is None:
                pieces.deal(LOGITS, launched, _LAUNCH)
                return pieces.side(optional=_NOT_STORED)
            side = pieces.side(optional=_NOT_STORED)
            problem = self._difference(texts, launched, self._free)
        if problem:
            side.problems.setdefault(LOGITS, f"without given experts, {problem}")
        return side

    def _difference(self, texts: Texts, launched: torch.Tensor, free: Executor) -> str:
        """Run instructions with their own choices; return how the launch differs, or nothing."""
        _place(free, texts)
        free.observe(self._order(self._start.program), lambda instruction: unseen)
        same = same_bits(free.logits, launched)
        return "" if same else f"{_LAUNCH} has other bits than its instructions one by one"

    def close(self) -> None:
        """Release all executors."""
        super().close()
        self._launched.close()
        if self._free is not None:
            self._free.close()


_LAUNCH = "a launch of the whole step"


def _replay(memory: Sequence[torch.Tensor], instruction: TopExperts, experts: torch.Tensor) -> None:
    """Write given experts of a sequence, and their scores, where the instruction has chosen."""
    operands, row = instruction.at, instruction.sequence
    logits, scores, ids = (
        memory[place][row].cpu() for place in (operands.logits, operands.scores, operands.ids)
    )
    if bool(same_experts(ids, experts)):
        return
    routed = Routed(logits, scores, ids.long())
    memory[operands.scores][row] = replayed(routed, experts, operands.normalized)
    memory[operands.ids][row] = experts.to(ids.dtype)


def _place(executor: Executor, texts: Texts) -> None:
    new = texts.new()
    executor.place(new["input_ids"], new["lengths"], texts.tables)


_KEEPING = {
    **{
        kind.name: AttentionLayer
        for kind in (NormQkvRopeAppend, NormQkvRows, PartialAttention, AttentionReduce)
    },
    DeltaStep.name: DeltaLayer,
}
"""The instructions whose layers are those of the cache or of the states, and these layers."""


def _layer_of(structure: Structure, instruction: StepInstruction) -> int | None:
    """Return the layer of the model that an instruction belongs to, or None outside the layers."""
    place, kind = instruction.layer, _KEEPING.get(instruction.name)
    if kind is None:
        return None if place == NONE else place
    layers = (
        layer for layer in structure.layers if isinstance(layer, kind) and layer.place == place
    )
    return next(layers).number
