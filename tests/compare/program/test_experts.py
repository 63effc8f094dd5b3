"""Programs of mixtures follow eager's choices: changed ones pass, and mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import pytest
import torch

from tests.compare.mistakes_of_experts import tied
from tests.compare.program.cases import WORKERS, in_order
from tests.compare.program.wrong import Spoilt, anywhere, functions, operands, weights
from tpcompile.backends.executor import Executor
from tpcompile.backends.native import Native
from tpcompile.backends.reference import Machine
from tpcompile.compare.comparison import Comparison
from tpcompile.compare.group_rows import GroupRow
from tpcompile.compare.program import Batch, Case, plan_for, prepare
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.vm.groups import TopExperts
from tpcompile.vm.lowering import lower
from tpcompile.vm.program import Role
from tpcompile.vm.program.instruction import Probe
from tpcompile.vm.schedule.scheduled import scheduled
from tpcompile.vm.targets import target_of

BATCH = Batch((9, 6, 4, 3, 3, 1), 2)
"""Several sequences, so that each layer has tokens with equal logits."""
DTYPES = (torch.float32, torch.bfloat16)


@lru_cache
def case_of(dtype: torch.dtype, tp: int = 2, family: str = "qwen3_moe") -> Case:
    return prepare(tied(dtype, family), decode_pipeline(tp, 2, 4), BATCH)


def compared(
    case: Case, change: Callable[[Spoilt], Spoilt] | None = None, backend: type[Executor] = Machine
) -> Comparison:
    plan = plan_for(case, WORKERS)
    if backend is not Machine:
        program = scheduled(case.graph, target_of("cpu", WORKERS), plan).proved
        return case.against(program, backend=backend)
    lowered = lower(case.graph, replace(plan, grain=4))
    if change is not None:
        case, lowered = change((case, lowered))
    return case.against(in_order(lowered))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_change_choices_and_nothing_else(dtype: torch.dtype, tp: int) -> None:
    comparison = compared(case_of(dtype, tp), backend=Native)
    assert comparison.ok, comparison.table()
    changed = [choice for choices in comparison.choices for choice in choices.changed]
    assert {choice.side for choice in changed} == {"torch module", "program", "native"}
    assert {choice.step for choice in changed} == {1, 2}
    assert all(choice.ok for choice in changed)
    assert f"{len(changed)} changed choices of {3 * 2 * 2 * 6} (" in comparison.table()
    lengths = dict(enumerate(BATCH.lengths))
    assert all(choice.token == lengths[choice.sequence] + choice.step - 2 for choice in changed)
    if dtype == torch.float32:
        assert max(row.rel for row in comparison.rows) < 1e-5


def test_with_linear_attention_and_a_shared_expert() -> None:
    comparison = compared(case_of(torch.bfloat16, 1, "qwen3_5_moe_text"), backend=Native)
    assert comparison.ok, comparison.table()
    assert any(choices.changed for choices in comparison.choices)


def test_scores_are_compared_in_the_order_of_eager() -> None:
    """In fp32 they have the error of the others, also where a choice is changed."""
    comparison = compared(case_of(torch.float32))
    scores = [row for row in comparison.rows if row.node == "scores"]
    assert len(scores) == 2 * 2 * 2 and max(row.rel for row in scores) < 1e-5


def _next(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give each expert the weights of another one with other logits."""
    return [tensor.roll(2, 0) for tensor in tensors]


def _least(logits: torch.Tensor, descending: bool, stable: bool) -> Any:
    return _SORT(logits, descending=not descending, stable=stable)


_SORT = torch.sort


MISTAKES: dict[str, tuple[str, Callable[[Spoilt], Spoilt]]] = {
    "router of another order": ("router", weights("l1_gate_weight", _next)),
    "scores not normalised": ("scores", operands(TopExperts, normalized=False)),
    "the least experts": ("choice", functions(TopExperts, anywhere, (torch, "sort", _least))),
    "gate and up of others": ("mlp_residual", weights("l1_experts_gate_up_proj", _next)),
    "down of others": ("mlp_residual", weights("l1_experts_down_proj", _next)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_at_their_group(mistake: str, dtype: torch.dtype) -> None:
    group, change = MISTAKES[mistake]
    first = compared(case_of(dtype), change).first_divergence
    assert isinstance(first, GroupRow)
    assert (first.side, first.node, first.layer) == ("program", group, 1)
    assert first.sequences and first.by


class _Spoilt(Native):
    """Native code after which something is written to the memory of a choice."""

    name: ClassVar[str] = "spoilt"

    def execute(self, number: int, probe: Probe) -> None:
        super().execute(number, probe)
        instruction: Any = self.memory.program.instructions[number]
        if isinstance(instruction, TopExperts) and (
            (instruction.layer, instruction.sequence) == (1, 3)
        ):
            self.spoil(self.memory.tensors, instruction)

    def spoil(self, memory: Any, instruction: TopExperts) -> None:
        """Write something."""


class _OneTwice(_Spoilt):
    def spoil(self, memory: Any, instruction: TopExperts) -> None:
        ids = memory[instruction.at.ids]
        ids[instruction.sequence, 0] = ids[instruction.sequence, 1]


class _ScoresSwapped(_Spoilt):
    def spoil(self, memory: Any, instruction: TopExperts) -> None:
        scores = memory[instruction.at.scores]
        scores[instruction.sequence] = scores[instruction.sequence].flip(0)


@pytest.mark.parametrize(("backend", "group"), [(_OneTwice, "choice"), (_ScoresSwapped, "scores")])
def test_mistakes_of_a_kernel(backend: type[Executor], group: str) -> None:
    first = compared(case_of(torch.bfloat16), backend=backend).first_divergence
    assert isinstance(first, GroupRow)
    assert (first.side, first.node, first.layer) == ("spoilt", group, 1)
    if group == "choice":
        assert first.sequences == (3,)


class _OtherLaunch(Native):
    name: ClassVar[str] = "spoilt"

    def launch(self, steps: int, *options: Any) -> int:
        done = super().launch(steps, *options)
        self.memory.values(Role.LOGITS)[0][0, 0] += 1
        return done


def test_a_launch_with_other_bits() -> None:
    """A launch makes its own choices; its logits are those of the instructions with theirs."""
    first = compared(case_of(torch.float32), backend=_OtherLaunch).first_divergence
    assert isinstance(first, GroupRow) and (first.side, first.node) == ("spoilt", "logits")
    assert "without given experts, a launch of the whole step has other bits" in first.problem
