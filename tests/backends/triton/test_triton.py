"""Tests of the Triton kernel in Triton's interpreter: whole schedules, launches and deadlocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton import JITFunction

import tpcompile
from tests.backends.programs import memory_of
from tests.backends.reference.step_models import (
    APART,
    BIASED,
    EVEN,
    EXPERTS,
    FEW_TOKENS,
    HYBRID,
    HYBRID_EXPERTS,
    HYBRID_ODD,
    HYBRID_SHORT,
    ONE_LAYER,
    SHARED,
    WHOLE,
    WINDOWED,
)
from tests.backends.reference.stepping import Case, place, steps_of, steps_on
from tests.models import relative_error
from tpcompile.backends.executor import Executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference import Machine
from tpcompile.backends.triton import Triton
from tpcompile.backends.triton.emit import emit
from tpcompile.backends.triton.load import load_kernels, tiles_package
from tpcompile.errors import RankError, UnsupportedError, UsageError
from tpcompile.vm.program.program import Wait

EXACT = 1e-5
"""The tolerance against the reference machine in fp32: only the order of sums differs."""
CASE = Case(FEW_TOKENS, tp=2, lengths=(9, 3))

CASES = {
    "qwen2, bias, 8 workers": Case("tiny-qwen2", lengths=(9,), workers=8),
    "qwen2, row blocks, interleaved": Case(
        "tiny-qwen2", lengths=(9,), lowering="rows", interleaved=True, policy="zigzag", workers=8
    ),
    "qwen3, four sequences, two ranks": Case(
        FEW_TOKENS, tp=2, lengths=(1, 4, 5, 9), spans=3, policy="wave"
    ),
    "qwen3, row blocks, two ranks, shared queues": Case(
        FEW_TOKENS, tp=2, lengths=(5,), lowering="rows", policy="dynamic", workers=8
    ),
    "windows, shared queues": Case(WINDOWED, lengths=(14, 2), policy="dynamic", workers=8),
    "windows, more spans than blocks": Case(WINDOWED, lengths=(14,), spans=7),
    "bias everywhere, columns split": Case(
        BIASED, tp=2, lengths=(5,), column_splits=2, policy="round-robin"
    ),
    "bias and head norms, interleaved": Case(
        EVEN, lengths=(4,), interleaved=True, policy="round-robin"
    ),
    "linear attention, three sequences": Case(HYBRID, lengths=(9, 1, 4), workers=8),
    "linear attention, row blocks, two ranks, shared queues": Case(
        HYBRID, tp=2, lengths=(5, 1), lowering="rows", policy="dynamic", workers=8
    ),
    "linear attention, odd widths, three taps, three ranks": Case(
        HYBRID_ODD, tp=3, lengths=(6, 1), policy="wave"
    ),
    "linear attention, two taps, whole heads rotated": Case(
        HYBRID_SHORT, tp=2, lengths=(3,), policy="zigzag"
    ),
    "experts, two ranks, shared queues": Case(EXPERTS, tp=2, lengths=(9, 3), policy="dynamic"),
    "whole experts, five ranks": Case(WHOLE, tp=5, lengths=(4, 1), policy="wave", workers=2),
    "shared expert, row blocks": Case(SHARED, lengths=(5,), lowering="rows", policy="zigzag"),
    "linear attention, experts": Case(HYBRID_EXPERTS, tp=2, lengths=(6, 1), policy="round-robin"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_steps_are_those_of_the_reference_machine(case: Case) -> None:
    steps = 2 if case.policy == "dynamic" else 1  # shared queues also have turns in launches
    for actual, expected in zip(
        steps_on(Triton(case.memory()), case, steps), steps_of(case, steps), strict=True
    ):
        assert relative_error(actual, expected) < EXACT


def test_an_mlp_of_two_weights_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="triton backend has no kernel for norm_gate"):
        Triton(Case(APART, lengths=(9,)).memory())


@pytest.mark.parametrize("policy", ["critical-path", "dynamic"])
def test_132_workers(policy: str) -> None:
    case = Case(ONE_LAYER, lengths=(9,), workers=132, policy=policy)
    (logits,) = steps_on(Triton(case.memory()), case, 1)
    assert relative_error(logits, steps_of(case, 1)[0]) < EXACT


@pytest.mark.parametrize("model", [FEW_TOKENS, HYBRID])
def test_bits_do_not_depend_on_the_schedule(model: str) -> None:
    case = Case(model, lengths=(9, 3))
    (wanted,) = steps_on(Triton(case.memory()), case, 1)
    for policy, workers, lowering in (
        ("dynamic", 8, "heads"),
        ("round-robin", 1, "rows"),
        ("wave", 5, "rows"),
    ):
        other = replace(case, policy=policy, workers=workers, lowering=lowering)
        (logits,) = steps_on(Triton(other.memory()), other, 1)
        assert torch.equal(logits, wanted), (policy, workers, lowering)


@pytest.mark.parametrize("model", [FEW_TOKENS, HYBRID])
def test_bits_do_not_depend_on_the_batch(model: str) -> None:
    single, several = Case(model, lengths=(1,)), Case(model, lengths=(1, 1, 1))
    alone, together = (steps_on(Triton(case.memory()), case, 2) for case in (single, several))
    for logits, batched in zip(alone, together, strict=True):
        assert torch.equal(batched[0], logits[0])


def test_a_wait_that_is_never_met_is_a_deadlock() -> None:
    """The error names the worker, its instruction and the counter that it waits for."""
    case = Case("tiny-qwen3", lengths=(9,))
    memory = case.memory()
    number, counter = never_met(memory)
    triton = Triton(memory, verify=False)
    place(triton, case)
    label = case.program.instructions[number].label
    with pytest.raises(RankError, match=rf"worker 1 before {label} for counter {counter}"):
        triton.run()
    with pytest.raises(UsageError, match="Compile the model again"):
        triton.run()


def never_met(memory: StepMemory) -> tuple[int, int]:
    """Let worker 1 wait at once, forever; return its instruction and the counter."""
    program = memory.program
    number = program.queues[1][0]
    waits = list(program.waits)
    counter = next(counters[0] for counters in program.signals if counters)
    waits[number] = (*waits[number], Wait(counter, 1 + len(program.instructions)))
    memory.program = replace(program, waits=tuple(waits))
    return number, counter


def test_each_tile_alone() -> None:
    """Each branch computes what the reference machine computes, from the same memory."""
    for case in CASES.values():
        machine, kernel = case.machine(), Triton(case.memory())
        place(machine, case)
        place(kernel, case)
        branches: set[int] = set()
        for number in range(len(case.program.instructions)):
            branch = int(kernel.emitted.branches[number])
            if branch not in branches:
                _copy(machine, kernel)
                kernel.execute(number, _ignore)
            machine.execute(number, _ignore)
            if branch not in branches:
                _check_same(machine, kernel)
            branches.add(branch)
        assert len(branches) == int(kernel.emitted.branches.max()) + 1


def _ignore(*values: object) -> None:
    """Take values, as a probe does."""


def _copy(source: Machine, target: Triton) -> None:
    for old, new in zip(source.memory.tensors, target.memory.tensors, strict=True):
        new.copy_(old)


def _check_same(machine: Machine, kernel: Triton) -> None:
    buffers = machine.memory.program.buffers
    triples = zip(buffers, machine.memory.tensors, kernel.memory.tensors, strict=True)
    for buffer, reference, tensor in triples:
        assert torch.allclose(tensor, reference, EXACT, EXACT, equal_nan=True), buffer.name


def test_one_branch_per_shape() -> None:
    """The two layers share their branches: nothing is emitted per layer."""
    kernel = Triton(CASE.memory()).emitted
    assert kernel.source.count("project.linear_terms(") == 2  # attention and MLP differ in width
    assert kernel.source.count("qkv.norm_qkv_rope_append(") == 3  # queries, keys, values
    assert kernel.source.count("head.argmax(") == 1


@pytest.mark.parametrize(
    ("dtype", "model"),
    [
        (torch.bfloat16, HYBRID),
        (torch.float16, ONE_LAYER),
        pytest.param(torch.bfloat16, FEW_TOKENS, marks=pytest.mark.slow),
        pytest.param(torch.float16, HYBRID, marks=pytest.mark.slow),
    ],
)
def test_16_bits(dtype: torch.dtype, model: str) -> None:
    """The error relative to fp32 is at most 1.5 times that of the reference machine."""
    exact = _first_steps(Machine, torch.float32, model)
    reference, actual = (_first_steps(kind, dtype, model) for kind in (Machine, Triton))
    assert relative_error(actual, exact) <= 1.5 * relative_error(reference, exact)


def _first_steps(kind: type[Executor], dtype: torch.dtype, model: str) -> torch.Tensor:
    """Return the logits of the first two tokens of a sequence, in fp32."""
    executor, logits = kind(memory_of(model, dtype, 2, 1)), []
    for step in range(2):
        executor.place(torch.tensor([7 * step]), torch.tensor([step + 1]), torch.arange(2)[None])
        executor.run()
        logits.append(executor.logits.float())
    return torch.stack(logits)


def test_ranks_in_processes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"all ranks in one process.*simulate=True"):
        tpcompile.compile(CASE.pair.eager, tp=2, backend="triton")


def test_generated_kernels_are_ordinary_source() -> None:
    """The source can be loaded for a GPU, and Triton finds its text."""
    source = emit(CASE.program, tiles_package(interpret=False)).source
    kernel = load_kernels(source, interpret=False).megakernel
    assert isinstance(kernel, JITFunction) and "sync.comes" in kernel.src
