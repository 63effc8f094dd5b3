"""Steps measured on random memory: every instruction has times, weights are made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.backends.reference.stepping import Case
from tests.pages import asks_for_huge_pages
from tpcompile.backends.measuring import RandomMemory, measure
from tpcompile.presets import preset
from tpcompile.scheduling import schedule
from tpcompile.vm.program import Role
from tpcompile.vm.program.weight import Weight


@pytest.mark.parametrize("policy", ["critical-path", "dynamic"])
@pytest.mark.parametrize("context", [1, 5, 62])
def test_every_instruction_begins_waits_and_ends(context: int, policy: str) -> None:
    case = Case("tiny-qwen3", lengths=(5, 5), tp=2, workers=1, policy=policy)
    done: list[int] = []
    measurement = measure(case.program, context, repeats=2, progress=done.append)
    assert (len(measurement.steps), done) == (2, [1, 2])
    for step in measurement.steps:
        for begin, ready, end in zip(
            step.begins, step.timing.starts, step.timing.finishes, strict=True
        ):
            assert begin >= 0 and 0 <= ready <= end and begin <= end
        assert len(step.timing.idle) == 2
        assert step.step_us > 0
    assert all(us > 0 for us in measurement.costs)


def test_programs_share_weights_and_fill_their_caches() -> None:
    random = RandomMemory()
    first, second = (
        random.memory(Case("tiny-qwen3", lengths=(5,) * batch).program) for batch in (1, 4)
    )
    for cache, other in zip(first.values(Role.CACHE), second.values(Role.CACHE), strict=True):
        assert cache.count_nonzero() == cache.numel() and other.count_nonzero() == other.numel()
    weights = {
        buffer.name: tensor
        for buffer, tensor in zip(first.program.buffers, first.tensors, strict=True)
        if buffer.role == Role.WEIGHT
    }
    for buffer, tensor in zip(second.program.buffers, second.tensors, strict=True):
        if buffer.role == Role.WEIGHT:
            assert tensor.data_ptr() == weights[buffer.name].data_ptr()
            assert bool(torch.isfinite(tensor).all()) and tensor.std() > 0.01


def test_weights_and_caches_are_in_pages_like_those_of_ranks() -> None:
    """The rate of reading depends on them: small ones took a third longer."""
    memory = RandomMemory().memory(Case("tiny-qwen3", lengths=(5,)).program)
    for buffer, tensor in zip(memory.program.buffers, memory.tensors, strict=True):
        if buffer.role in (Role.WEIGHT, Role.CACHE):
            assert asks_for_huge_pages(tensor.data_ptr()), buffer.name


def test_components_of_quantized_weights() -> None:
    """Programs share them, and they are not all zero."""
    random = RandomMemory()
    options: dict[str, Any] = {"target": "cpu", "weights": "int4:16"}
    first, second = (
        random.memory(schedule("preset:tiny-qwen3", batch=batch, **options).program)
        for batch in (1, 2)
    )
    name = "l0_down_proj_weight"
    (number,) = (n for n, buffer in enumerate(first.program.buffers) if buffer.name == name)
    (other,) = (n for n, buffer in enumerate(second.program.buffers) if buffer.name == name)
    assert str(first.program.buffers[number].format) == "int4:16:f32"
    assert len(first.tensors[number][:4].unique()) > 100
    assert torch.equal(first.tensors[number][:4], second.tensors[other][:4])
    assert (0, f"{name}_packed", (64, 22)) in random._weights
    assert len(random._weights) == len({key[:2] for key in random._weights})


def test_floats_of_8_bits_have_the_range_of_a_checkpoint(tmp_path: Path) -> None:
    """Kernels are slower for numbers without a leading one, of which real weights have few."""
    config = AutoConfig.for_model(**preset("tiny-qwen3"))
    blocks = {"activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    config.quantization_config = {"quant_method": "fp8", **blocks}
    config.save_pretrained(tmp_path)
    memory = RandomMemory().memory(schedule(tmp_path, target="cpu").program)
    weights = [held for held in memory.tensors if isinstance(held, Weight)]
    assert weights
    for weight in weights:
        numbers = weight.parts[weight.format.values.suffix].float()
        assert bool(numbers.isfinite().all()) and numbers.abs().max() > 300
        assert (numbers.abs() < 2**-6).float().mean() < 0.01
