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


def anywhere(one: Any) -> bool:
    return True


def instructions(kind: type, change: Change, which: Which = lambda one: True) -> Change:
    """Change the instructions of a kind in layer 1, or in the whole step if they have no layer."""

    def changed(lowered: Lowered) -> Iterator[Any]:
        found = False
        for one in lowered.instructions:
            wanted = isinstance(one, kind) and one.layer in (1, -1) and which(one)
            found |= wanted
            yield change(one) if wanted else one
        assert found, "no instruction was changed"

    def spoil(spoilt: Spoilt) -> Spoilt:
        case, lowered = spoilt
        return case, replace(lowered, instructions=tuple(changed(lowered)))

    return spoil


def operands(kind: type, which: Which = lambda one: True, **changes: Any) -> Change:
    """Replace operands; a callable value receives the current operands."""

    return instructions(kind, lambda one: _with(one, changes), which)


def _with(one: Any, changes: dict[str, Any]) -> Any:
    new = {k: v(one.at) if callable(v) else v for k, v in changes.items()}
    return replace(one, at=replace(one.at, **new))


def runs_with(kind: type, which: Which = anywhere, **changes: Any) -> Change:
    """Run with other operands, which the program itself could not have."""
    return instructions(kind, lambda one: RunsAs(one, _with(one, changes)), which)


def functions(kind: type, which: Which, *patches: tuple[Any, str, Any]) -> Change:
    return instructions(kind, lambda one: Patched(one, patches), which)


def memory(kind: type, which: Which, change: Any, back: Any = None) -> Change:
    return instructions(kind, lambda one: OtherMemory(one, change, back), which)


def weights(name: str, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Change:
    """Replace each rank's tensor of a weight."""

    def spoil(spoilt: Spoilt) -> Spoilt:
        case, lowered = spoilt
        return replace(case, weights={**case.weights, name: change(case.weights[name])}), lowered

    return spoil


def of(part: Part) -> Which:
    """Select instructions that compute queries, keys or values."""
    return lambda one: one.at.part == part


def on_rank(rank: int) -> Which:
    return lambda one: one.rank == rank


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
    return [one.what.replace(" ", "-") for one in mistakes]


def assert_found(one: Wrong) -> None:
    case, lowered = one.mistake(one.right)
    first = case.against(in_order(lowered)).first_divergence
    assert isinstance(first, GroupRow)
    group, _, layer = one.group.partition(" of layer ")
    wanted = None if group in ENDS else int(layer or 1)
    assert (first.side, first.node, first.layer) == ("program", group, wanted)
    assert first.problem.startswith(one.problem)
    assert first.by or first.problem


def assert_well(mistakes: Sequence[Wrong]) -> None:
    seen = {(one.model, one.tp, one.lowering, one.interleaved): one for one in mistakes}
    for one in seen.values():
        case, lowered = one.right
        found = case.against(in_order(lowered))
        assert found.ok, found.table()
