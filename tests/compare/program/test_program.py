"""Programs on executors other than the reference machine, compared value by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tests.compare.program.cases import HYBRID, QWEN3, case_of
from tpcompile.backends.executor import Executor
from tpcompile.backends.native import Native
from tpcompile.backends.reference import Machine
from tpcompile.compare.comparison import Comparison
from tpcompile.compare.group_rows import GroupRow
from tpcompile.compare.program import plan_for
from tpcompile.errors import UnsupportedError
from tpcompile.vm.groups import DeltaStep, LinearResidual, NormQkvRopeAppend
from tpcompile.vm.program import Role
from tpcompile.vm.program.instruction import Probe
from tpcompile.vm.schedule.scheduled import scheduled
from tpcompile.vm.targets import target_of

STORED = ["q_rotated", "k_cached", "v_cached", "partial_lse", "partial_values"]
REST = ["attention_residual", "swiglu", "mlp_residual"]
STORED += ["attention", *REST]
LINEAR = ["projected", "gates", "tail", "state", "mixed", *REST]


def rows_of(comparison: Comparison, side: str) -> list[GroupRow]:
    return [row for row in comparison.rows if isinstance(row, GroupRow) and row.side == side]


def on(
    backend: type[Executor], tp: int = 1, lowering: str = "heads", model: str = QWEN3
) -> Comparison:
    case = case_of(model, tp)
    plan = plan_for(case, 3, lowering)
    program = scheduled(case.graph, target_of("cpu", 3), plan).proved
    return case.against(program, backend=backend)


@pytest.mark.parametrize("lowering", ["heads", "rows"])
@pytest.mark.parametrize("tp", [1, 3])
def test_native_code_reports_every_stored_value(tp: int, lowering: str) -> None:
    comparison = on(Native, tp, lowering)
    names = ["embedding", *(name for _ in range(2) for name in STORED), "logits", "token"]
    assert [row.node for row in rows_of(comparison, "native")] == names
    assert comparison.ok, comparison.table()
    assert list(comparison.top5) == ["eager", "torch module", "program", "native"]


@pytest.mark.parametrize("tp", [1, 2])
def test_native_code_with_linear_attention(tp: int) -> None:
    comparison = on(Native, tp, model=HYBRID)
    layers = [*LINEAR, "attention_gate", *STORED] * 2
    assert [row.node for row in rows_of(comparison, "native")] == [
        "embedding",
        *layers,
        "logits",
        "token",
    ]
    assert comparison.ok, comparison.table()


def spoils(kind: type[Any], change: Callable[[Any, Any], None]) -> type[Executor]:
    """Return native code that is wrong after the first instruction of a kind and layer 1."""

    class Spoilt(Native):
        name: ClassVar[str] = "native"

        def execute(self, number: int, probe: Probe) -> None:
            super().execute(number, probe)
            instruction = self.memory.program.instructions[number]
            if isinstance(instruction, kind) and instruction.layer == 1:
                change(instruction, self.memory.tensors)

    return Spoilt


def one_row(instruction: Any, memory: Any) -> None:
    memory[instruction.at.out][0, instruction.rows.start] += 1e-3


def one_head(instruction: Any, memory: Any) -> None:
    if instruction.at.part.name == "Q":
        memory[instruction.at.out][1, instruction.heads.start * instruction.at.width] += 1e-3


@pytest.mark.parametrize(
    ("kind", "change", "node"),
    [(LinearResidual, one_row, "attention_residual"), (NormQkvRopeAppend, one_head, "q_rotated")],
)
def test_the_first_wrong_kernel_is_named(
    kind: type[Any], change: Callable[[Any, Any], None], node: str
) -> None:
    comparison = on(spoils(kind, change))
    first = comparison.first_divergence
    assert isinstance(first, GroupRow)
    assert (first.side, first.node, first.layer) == ("native", node, 1)
    assert first.by[0].startswith(kind.name)
    assert all(row.ok for row in rows_of(comparison, "program"))


def test_a_wrong_state_is_named() -> None:
    """The state of one head is wrong after the instruction that writes it."""

    def change(instruction: Any, memory: Any) -> None:
        sequence = int(memory[instruction.at.write][instruction.sequence])
        memory[instruction.at.states][1, sequence, instruction.heads.start, 0, 0] += 1e-2

    first = on(spoils(DeltaStep, change), model=HYBRID).first_divergence
    assert isinstance(first, GroupRow)
    assert (first.side, first.node, first.layer) == ("native", "state", 2)
    assert (first.heads, first.rows) == ((0, 2, 4), (0, 1))
    assert first.by == ("the states of rank 0",)


def test_a_launch_with_other_bits_is_reported() -> None:
    class Races(Machine):
        name: ClassVar[str] = "races"

        def launch(self, steps: int, *options: Any) -> int:
            done = super().launch(steps, *options)
            self.memory.values(Role.LOGITS)[0][0, 0] += 1e-6
            return done

    comparison = on(Races)
    (wrong,) = [row for row in comparison.rows if not row.ok]
    assert isinstance(wrong, GroupRow)
    assert (wrong.side, wrong.node) == ("races", "logits")
    assert "a launch of the whole step" in wrong.problem


def test_a_backend_without_single_instructions_is_refused() -> None:
    class Launches(Machine):
        name: ClassVar[str] = "launches"
        execute = Executor.execute

    with pytest.raises(UnsupportedError, match="cannot run instructions one by one"):
        on(Launches)
