"""The Triton kernel on a GPU: real schedules, launches of several steps, bits and times."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import tpcompile
from tests.backends.reference.step_models import EXPERTS, HYBRID, SHARED
from tests.backends.reference.stepping import Case, place, steps_of, steps_on
from tests.backends.triton.test_triton import CASES, EXACT, never_met
from tests.models import relative_error
from tests.runtime.eager_pair import lively
from tpcompile.backends.triton import Triton
from tpcompile.cli import main
from tpcompile.errors import RankError
from tpcompile.vm.program.buffer import LINEAR_STATES
from tpcompile.vm.schedule.measured import measured_step
from tpcompile.vm.schedule.policies import POLICIES

GPU = torch.device("cuda")
CASE = Case("tiny-qwen3", tp=2, lengths=(9, 3))
LINEAR = Case(HYBRID, tp=2, lengths=(9, 1))
MIXTURE = Case(EXPERTS, tp=2, lengths=(9, 1))
IDS = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_steps_are_those_of_the_reference_machine(case: Case) -> None:
    steps = steps_on(Triton(case.memory(device=GPU)), case, 2)
    for logits, wanted in zip(steps, steps_of(case, 2), strict=True):
        assert relative_error(logits.cpu(), wanted) < EXACT


@pytest.mark.parametrize(
    "case", [CASE, LINEAR, MIXTURE], ids=["attention", "linear attention", "experts"]
)
def test_several_steps_in_one_launch(case: Case) -> None:
    stepped, many = Triton(case.memory(device=GPU)), Triton(case.memory(device=GPU))
    place(stepped, case)
    place(many, case)
    for _ in range(3):
        assert torch.equal(many.run(4), torch.cat([stepped.run() for _ in range(4)]))
    assert torch.equal(many.logits, stepped.logits)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [1, 8, 100])
def test_bits_do_not_depend_on_the_schedule(policy: str, workers: int) -> None:
    case = Case("tiny-qwen3", lengths=(9, 3))
    (wanted,) = steps_on(Triton(case.memory(device=GPU)), case, 1)
    other = replace(case, policy=policy, workers=workers)
    for _ in range(10):
        (logits,) = steps_on(Triton(other.memory(device=GPU)), other, 1)
        assert torch.equal(logits, wanted)


def test_bits_of_linear_attention() -> None:
    """They depend neither on the schedule nor on the other sequences."""
    case = replace(LINEAR, lengths=(1,))
    wanted = steps_on(Triton(case.memory(device=GPU)), case, 2)
    for other in (
        replace(case, policy="dynamic", workers=60),
        replace(case, lowering="rows", workers=60),
        replace(case, lengths=(1, 1)),
        replace(case, lengths=(1,) * 10),
    ):
        steps = zip(steps_on(Triton(other.memory(device=GPU)), other, 2), wanted, strict=True)
        assert all(torch.equal(actual[0], expected[0]) for actual, expected in steps), other


@pytest.mark.parametrize("model", [EXPERTS, SHARED])
def test_bits_of_experts(model: str) -> None:
    """They depend neither on the schedule nor on others that have chosen the same experts."""
    case = Case(model, tp=2, lengths=(1,))
    wanted = steps_on(Triton(case.memory(device=GPU)), case, 2)
    for other in (
        replace(case, policy="dynamic", workers=60),
        replace(case, lowering="rows", workers=60),
        replace(case, lengths=(1, 1)),
        replace(case, lengths=(1,) * 20),
    ):
        steps = zip(steps_on(Triton(other.memory(device=GPU)), other, 2), wanted, strict=True)
        assert all(torch.equal(actual[0], expected[0]) for actual, expected in steps), other


def test_states_of_linear_attention() -> None:
    """A launch stores the states of its last step, and keeps those that it reads."""
    kernel, machine = Triton(LINEAR.memory(device=GPU)), LINEAR.machine()
    for executor in (kernel, machine):
        place(executor, LINEAR, read=torch.tensor([0, 1]), write=torch.tensor([3, 2]))
        executor.run(3)
    before = LINEAR.memory()
    for role in LINEAR_STATES:
        sides = (memory.values(role) for memory in (kernel.memory, machine.memory, before))
        for actual, expected, old in zip(*sides, strict=True):
            assert relative_error(actual[:, 2:].cpu(), expected[:, 2:]) < EXACT
            assert torch.equal(actual[:, :2].cpu().nan_to_num(), old[:, :2].nan_to_num())


def test_a_wait_that_is_never_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives up after some looks, and the error names the worker."""
    from tpcompile.backends.triton import executor

    monkeypatch.setattr(executor, "SPINS", 1 << 14)
    case = Case("tiny-qwen3", lengths=(9,))
    memory = case.memory(device=GPU)
    _, counter = never_met(memory)
    triton = Triton(memory, verify=False)
    place(triton, case)
    with pytest.raises(RankError, match=rf"worker 1 before .* for counter {counter}"):
        triton.run()


def test_times_of_instructions() -> None:
    triton = Triton(CASE.memory(device=GPU))
    place(triton, CASE)
    times = torch.zeros(len(CASE.program.instructions), 3, dtype=torch.int64)
    triton.run(2, times)
    assert bool((times.diff(dim=1) >= 0).all())
    assert measured_step(CASE.program, times).step_us > 0


def test_a_schedule_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    line = "schedule preset:tiny-qwen3 --dtype bf16 --target h100 --workers 8 --batch 3"
    assert main([*line.split(), "--measured", "--device", "cuda", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["measured_us"] > 0


def test_generation_decodes_in_the_kernel() -> None:
    eager = lively("tiny-qwen3").to(GPU)
    options = {"max_new_tokens": 24, "do_sample": False}
    with tpcompile.compile(eager, device="cuda", backend="triton", max_seq_len=64) as model:
        assert model.backend == "triton"
        tokens = model.generate(IDS.to(GPU), **options)
        assert model.steps[:2] == (23, 1)
    assert tokens.tolist() == eager.generate(IDS.to(GPU), **options).tolist()
