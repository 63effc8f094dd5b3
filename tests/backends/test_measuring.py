"""Steps measured on random memory: every instruction has times, weights are made once."""

from __future__ import annotations

import pytest
import torch

from tests.backends.reference.stepping import Case
from tpcompile.backends.measuring import RandomMemory, measure
from tpcompile.vm.program import Role


@pytest.mark.parametrize("policy", ["critical-path", "dynamic"])
@pytest.mark.parametrize("context", [1, 5, 62])
def test_every_instruction_begins_waits_and_ends(context: int, policy: str) -> None:
    case = Case("tiny-qwen3", lengths=(5, 5), tp=2, workers=1, policy=policy)
    done: list[int] = []
    found = measure(case.program, context, repeats=2, progress=done.append)
    assert (len(found.steps), done) == (2, [1, 2])
    for step in found.steps:
        for begin, ready, end in zip(
            step.begins, step.timing.starts, step.timing.finishes, strict=True
        ):
            assert begin >= 0 and 0 <= ready <= end and begin <= end
        assert len(step.timing.idle) == 2
        assert step.step_us > 0
    assert all(us > 0 for us in found.costs)


def test_programs_share_weights_and_fill_their_caches() -> None:
    random = RandomMemory()
    first, second = (
        random.memory(Case("tiny-qwen3", lengths=(5,) * batch).program) for batch in (1, 4)
    )
    for one, two in zip(first.values(Role.CACHE), second.values(Role.CACHE), strict=True):
        assert one.count_nonzero() == one.numel() and two.count_nonzero() == two.numel()
    weights = {
        buffer.name: tensor
        for buffer, tensor in zip(first.program.buffers, first.tensors, strict=True)
        if buffer.role == Role.WEIGHT
    }
    for buffer, tensor in zip(second.program.buffers, second.tensors, strict=True):
        if buffer.role == Role.WEIGHT:
            assert tensor.data_ptr() == weights[buffer.name].data_ptr()
            assert bool(torch.isfinite(tensor).all()) and tensor.std() > 0.01
