"""Tools to inject mistakes into a program: into operands, instructions and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from tests.compare.program.cases import QWEN3, case_of, in_order, lowered_of
from tpcompile.compare.group_rows import GroupRow
from tpcompile.compare.program import Case
from tpcompile.vm.groups.qkv_operands import Part
from tpcompile.vm.lowering import Lowered
from tpcompile.vm.program.instruction import Memory, Probe, StepInstruction, unseen

Change = Callable[[Any], Any]
Which = Callable[[Any], bool]
Spoilt = tuple[Case, Lowered]
ENDS = ("embedding", "final_norm", "logits", "token")


@dataclass(frozen=True)
class Mistaken:
    """Instruction that computes something else, but keeps the identity of the original."""

    one: StepInstruction

    def __getattr__(self, name: str) -> Any:
        return getattr(self.one, name)


@dataclass(frozen=True)
class Patched(Mistaken):
    """Instruction that runs with patched functions."""

    patches: tuple[tuple[Any, str, Any], ...]

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        with ExitStack() as stack:
            for owner, name, function in self.patches:
                stack.enter_context(mock.patch.object(owner, name, function))
            self.one.run(memory, probe)


@dataclass(frozen=True)
class RunsAs(Mistaken):
    """Instruction that runs as another one."""

    other: StepInstruction

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        self.other.run(memory, probe)


@dataclass(frozen=True)
class OtherMemory(Mistaken):
    """Instruction that runs on modified copies of buffers; its writes can be mapped back."""

    change: Callable[[list[torch.Tensor], Any], None]
    back: Callable[[Memory, list[torch.Tensor], Any], None] | None = None

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        other = list(memory)
        self.change(other, self.one.at)
        self.one.run(other, probe)
        if self.back:
            self.back(memory, other, self.one.at)


def anywhere(instruction: Any) -> bool:
    return True


def instructions(kind: type, change: Change, which: Which = lambda instruction: True) -> Change:
    """Change the instructions of a kind in layer 1, or in the whole step if they have no layer."""

    def changed(lowered: Lowered) -> Iterator[Any]:
        applied = False
        for instruction in lowered.instructions:
            wanted = (
                isinstance(instruction, kind)
                and instruction.layer in (1, -1)
                and which(instruction)
            )
            applied |= wanted
            yield change(instruction) if wanted else instruction
        assert applied, "no instruction was changed"

    def spoil(spoilt: Spoilt) -> Spoilt:
        case, lowered = spoilt
        return case, replace(lowered, instructions=tuple(changed(lowered)))

    return spoil


def operands(kind: type, which: Which = lambda instruction: True, **changes: Any) -> Change:
    """Replace operands; a callable value receives the current operands."""

    return instructions(kind, lambda instruction: _with(instruction, changes), which)


def _with(instruction: Any, changes: dict[str, Any]) -> Any:
    new = {k: v(instruction.at) if callable(v) else v for k, v in changes.items()}
    return replace(instruction, at=replace(instruction.at, **new))


def runs_with(kind: type, which: Which = anywhere, **changes: Any) -> Change:
    """Run with other operands, which the program itself could not have."""
    return instructions(
        kind, lambda instruction: RunsAs(instruction, _with(instruction, changes)), which
    )


def functions(kind: type, which: Which, *patches: tuple[Any, str, Any]) -> Change:
    return instructions(kind, lambda instruction: Patched(instruction, patches), which)


def memory(kind: type, which: Which, change: Any, back: Any = None) -> Change:
    return instructions(kind, lambda instruction: OtherMemory(instruction, change, back), which)


def weights(name: str, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Change:
    """Replace each rank's tensor of a weight."""

    def spoil(spoilt: Spoilt) -> Spoilt:
        case, lowered = spoilt
        return replace(case, weights={**case.weights, name: change(case.weights[name])}), lowered

    return spoil


def of(part: Part) -> Which:
    """Select instructions that compute queries, keys or values."""
    return lambda instruction: instruction.at.part == part


def on_rank(rank: int) -> Which:
    return lambda instruction: instruction.rank == rank


@dataclass(frozen=True)
class Wrong:
    """A mistake and the first group that diverges, by default in layer 1."""

    what: str
    group: str
    mistake: Change
    model: str = QWEN3
    tp: int = 3
    lowering: str = "heads"
    interleaved: bool = False
    problem: str = ""

    @property
    def right(self) -> Spoilt:
        """Return the program that the mistake is injected into."""
        options = {"interleaved": True} if self.interleaved else {}
        lowered = lowered_of(self.model, self.tp, self.lowering, **options)
        return case_of(self.model, self.tp, **options), lowered


def names(mistakes: Sequence[Wrong]) -> list[str]:
    return [mistake.what.replace(" ", "-") for mistake in mistakes]


def assert_found(wrong: Wrong) -> None:
    case, lowered = wrong.mistake(wrong.right)
    first = case.against(in_order(lowered)).first_divergence
    assert isinstance(first, GroupRow)
    group, _, layer = wrong.group.partition(" of layer ")
    wanted = None if group in ENDS else int(layer or 1)
    assert (first.side, first.node, first.layer) == ("program", group, wanted)
    assert first.problem.startswith(wrong.problem)
    assert first.by or first.problem


def assert_well(mistakes: Sequence[Wrong]) -> None:
    distinct = {
        (mistake.model, mistake.tp, mistake.lowering, mistake.interleaved): mistake
        for mistake in mistakes
    }
    for mistake in distinct.values():
        case, lowered = mistake.right
        comparison = case.against(in_order(lowered))
        assert comparison.ok, comparison.table()
