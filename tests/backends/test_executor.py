"""Tests of the executor interface, run on all registered executors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from tests.backends.processes import Processes
from tests.backends.reference.step_models import FEW_TOKENS
from tests.backends.reference.stepping import Case, eager_logits, place, steps_of
from tests.models import TOLERANCE, relative_error
from tpcompile.backends.executor import EXECUTORS, Executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference import Machine
from tpcompile.errors import CompileError, UsageError
from tpcompile.vm.program import Role, abi
from tpcompile.vm.program.abi import VERSION

CASE = Case(FEW_TOKENS, tp=2, lengths=(9, 4), spans=2)
"""The second sequence begins a block of the cache in the second step."""
STEPS = 2
Made = Executor | Processes
Make = Callable[..., Made]


def _in_one_process(name: str) -> Make:
    return lambda case=CASE, poison=True: EXECUTORS[name](case.memory(poison))


MAKERS = {name: _in_one_process(name) for name in EXECUTORS} | {
    f"{name} in processes": partial(Processes, name)
    for name, kind in EXECUTORS.items()
    if kind.in_processes
}


@pytest.fixture(params=MAKERS.values(), ids=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Provide a factory of executors, in a single process or with one process per rank."""
    executors: list[Made] = []

    def keeps(case: Case = CASE, poison: bool = True) -> Made:
        executors.append(request.param(case=case, poison=poison))
        return executors[-1]

    yield keeps
    for executor in executors:
        executor.close()


def _placed(executor: Made, case: Case = CASE, step: int = 0, **options: list[int]) -> None:
    place(executor, case, step, **options)


@pytest.mark.parametrize("poison", [True, False])
def test_steps_are_eager_s(make: Make, poison: bool) -> None:
    executor = make(poison=poison)
    eager = eager_logits(CASE.model, CASE.lengths)
    for step in range(STEPS):
        _placed(executor, step=step)
        executor.run()
        places = [length - 1 + step for length in CASE.lengths]
        wanted = torch.stack([row[position] for row, position in zip(eager, places, strict=True)])
        assert relative_error(executor.logits, wanted) < TOLERANCE


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("lowering", ["heads", "rows"])
def test_values_are_the_reference_machine_s(
    make: Make, request: pytest.FixtureRequest, tp: int, lowering: str
) -> None:
    """Logits match the reference machine: bitwise for itself, within tolerance for others."""
    exact = "reference" in request.node.callspec.id
    case = replace(CASE, tp=tp, lowering=lowering)
    executor = make(case)
    for step, wanted in enumerate(steps_of(case, STEPS)):
        _placed(executor, case, step=step)
        executor.run()
        assert relative_error(executor.logits, wanted) <= (0 if exact else TOLERANCE)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", list(EXECUTORS))
def test_later_steps_do_not_write_logits_that_were_handed_over(name: str, tp: int) -> None:
    case = replace(CASE, tp=tp)
    executor = EXECUTORS[name](case.memory())
    pairs = []
    for step in range(STEPS):
        place(executor, case, step)
        executor.run()
        wanted = executor.logits.clone()
        pairs.append((executor.hand_over_logits(), wanted))
    executor.close()
    assert all(torch.equal(handed, wanted) for handed, wanted in pairs)


def test_a_launch_of_many_steps_is_as_many_launches(make: Make) -> None:
    """Tokens and logits are those of single steps; counters are not cleared in between."""
    single, many = make(), make()
    for executor in (single, many):
        _placed(executor)
    assert torch.equal(many.run(2), torch.cat([single.run() for _ in range(2)]))
    assert torch.equal(many.logits, single.logits)


def test_sequences_end_at_stops(make: Make) -> None:
    free, stopped = make(), make()
    _placed(free)
    tokens = free.run(2)
    _placed(stopped, stops=sorted(set(tokens[1].tolist())))
    returned = stopped.run(4)
    assert len(returned) <= 2 and torch.equal(returned[0], tokens[0])


def test_bad_inputs_are_refused_before_a_step(make: Make) -> None:
    executor = make()
    _placed(executor)
    with pytest.raises(UsageError, match="steps"):
        executor.run(0)
    with pytest.raises(UsageError, match="steps"):
        executor.run(1000)
    assert len(executor.run(1)) == 1


@pytest.mark.parametrize("kind", EXECUTORS.values(), ids=list(EXECUTORS))
def test_a_closed_one_holds_no_memory(kind: type[Executor]) -> None:
    executor = kind(CASE.memory())
    executor.close()
    assert executor.memory.tensors == []


def test_one_built_for_another_interface_is_refused() -> None:
    class Older(Machine):
        name: ClassVar[str] = "older"
        abi: ClassVar[int] = VERSION - 1

    with pytest.raises(UsageError, match=rf"older .*version {VERSION - 1}"):
        Older(CASE.memory())


def test_a_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(CompileError, match=r"\(1,\)"):
        StepMemory(CASE.program, lambda rank, name: torch.ones(1), CASE.rotation)


def test_tensors_of_another_dtype_are_refused() -> None:
    """Tensors of another dtype are refused when memory is created, not when a step runs."""
    shapes = {(b.rank, b.name): b.shape for b in CASE.program.buffers}
    with pytest.raises(CompileError, match=r"in torch\.bfloat16.*in torch\.float32"):
        StepMemory(CASE.program, lambda *key: torch.ones(shapes[key]).bfloat16(), CASE.rotation)
    memory = CASE.memory()
    caches = [cache.bfloat16() for cache in memory.values(Role.CACHE)]
    with pytest.raises(UsageError, match=r"KV cache.*in torch\.bfloat16.*in torch\.float32"):
        memory.use_caches(caches)


def test_tensors_of_another_layout_are_refused() -> None:
    """Tensors of another layout are refused, since executors compute addresses from strides."""
    shapes = {(b.rank, b.name): b.shape for b in CASE.program.buffers}

    def columns(*key: Any) -> torch.Tensor:
        return torch.ones(shapes[key][::-1]).T

    with pytest.raises(CompileError, match=r"parameter .*memory layout .*strides \(1, "):
        StepMemory(CASE.program, columns, CASE.rotation)
    memory = replace(CASE, tp=1).memory()  # two heads, whose order in memory matters
    with pytest.raises(UsageError, match=r"KV cache of rank 0 must have the memory layout"):
        memory.use_caches([cache.contiguous() for cache in memory.values(Role.CACHE)])


def test_the_table_of_buffers_tells_where_everything_is() -> None:
    memory = CASE.memory()
    table, columns = memory.table(), abi.column_offsets()
    assert table.shape == (len(CASE.program.buffers), sum(abi.COLUMNS.values()))
    for row, buffer, tensor in zip(table, CASE.program.buffers, memory.tensors, strict=True):
        assert row[columns["address"]] == tensor.data_ptr()
        assert row[columns["role"]] == buffer.role and row[columns["rank"]] == buffer.rank
        strides = row[columns["strides"] :][: tensor.dim()]
        assert strides.tolist() == list(tensor.stride())
    (block,) = {int(row[columns["block"]]) for row in table if row[columns["role"]] == Role.CACHE}
    assert block == 4


def test_operands_that_disagree_with_buffers_are_refused() -> None:
    first = CASE.program.instructions[0]
    wrong = replace(first, at=replace(first.at, batch=7))  # type: ignore[type-var, attr-defined]
    program = replace(CASE.program, instructions=(wrong, *CASE.program.instructions[1:]))
    with pytest.raises(CompileError, match=r"batch|tokens"):
        StepMemory(program, lambda rank, name: torch.ones(1), CASE.rotation)
