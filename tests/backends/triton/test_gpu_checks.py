"""Tests of what is refused before a launch on a GPU, and of the arguments of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.backends.reference.step_models import HYBRID
from tests.backends.reference.stepping import Case, place
from tests.backends.triton.test_triton import CASE
from tpcompile.backends.executor import EXECUTORS
from tpcompile.backends.triton import Triton
from tpcompile.backends.triton.ahead import _type_of
from tpcompile.backends.triton.branches import branch_of
from tpcompile.backends.triton.gpu import check_gpu, check_shared, target_like
from tpcompile.backends.triton.load import load_kernels
from tpcompile.errors import UnsupportedError
from tpcompile.options import device_of
from tpcompile.vm.groups import Argmax, AttentionReduce, DeltaStep
from tpcompile.vm.targets import TARGETS


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU, as torch describes it."""

    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    shared_memory_per_block_optin: int = 232_448


def test_a_gpu_with_room_for_all_workers() -> None:
    check_gpu(Case("tiny-qwen3", lengths=(9,), workers=132).program, Gpu())
    check_shared(232_448, Gpu())


def test_more_workers_than_can_run_at_the_same_time() -> None:
    program = Case("tiny-qwen3", lengths=(9,), workers=132).program
    with pytest.raises(UnsupportedError, match=r"132 workers.*at most 114, the SMs of NVIDIA H200"):
        check_gpu(program, Gpu(multi_processor_count=114))


def test_workers_of_all_ranks_count() -> None:
    program = Case("tiny-qwen3", tp=2, lengths=(9,), workers=8).program
    check_gpu(program, Gpu(multi_processor_count=16))
    with pytest.raises(UnsupportedError, match="16 workers in all"):
        check_gpu(program, Gpu(multi_processor_count=15))


def test_a_gpu_that_is_too_old() -> None:
    with pytest.raises(UnsupportedError, match=r"compute capability 7\.5.*8\.0 or newer"):
        check_gpu(CASE.program, Gpu(name="Tesla T4", major=7, minor=5))


def test_too_little_shared_memory() -> None:
    with pytest.raises(UnsupportedError, match=r"139,520 bytes for small.*at most 101,376 bytes"):
        check_shared(139_520, Gpu(name="small", shared_memory_per_block_optin=101_376))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu() -> None:
    with pytest.raises(UnsupportedError, match="torch finds no GPU"):
        device_of("cuda")


@pytest.mark.parametrize("name", ["native", "reference"])
def test_an_executor_that_does_not_run_on_gpus(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"The {name} backend does not run on cuda"):
        EXECUTORS[name].check(CASE.program, torch.device("cuda"))


@pytest.mark.parametrize(
    ("name", "count", "ranks", "like", "workers"),
    [
        ("NVIDIA H200", 132, 1, "h200", 132),
        ("NVIDIA H100 80GB HBM3", 132, 2, "h100", 66),
        ("NVIDIA A100-SXM4-80GB", 108, 1, "a100", 108),
        ("NVIDIA GeForce RTX 4090", 128, 1, "cuda", 128),
    ],
)
def test_the_target_that_a_gpu_is(
    name: str, count: int, ranks: int, like: str, workers: int
) -> None:
    target = target_like(Gpu(name, multi_processor_count=count), ranks)
    assert (target.name, target.workers) == (like, workers)
    known = TARGETS["h100" if like == "cuda" else like]
    assert target.bytes_per_us == known.bytes_per_us and target.spans == known.spans


def test_the_kernel_gets_what_it_was_compiled_for() -> None:
    """The arguments of a launch have the names and types of the compilation ahead of time."""
    triton = Triton(CASE.memory())
    place(triton, CASE)
    kernel = load_kernels(triton.emitted.source, interpret=False).megakernel
    arguments = triton._arguments(torch.zeros(1, dtype=torch.int64))
    assert set(arguments) == set(kernel.arg_names)
    types = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32"}
    constants = {"SHARING", "SPINS", "TIMED"}
    for name, value in arguments.items():
        if name in constants:
            assert isinstance(value, int)
            continue
        assert types[value.dtype] == _type_of(name, {}), name
        assert value.is_contiguous() and value.data_ptr() % 16 == 0, name


def test_times_of_instructions() -> None:
    """Each is taken, becomes ready and is done in this order, after all that it depends on."""
    triton = Triton(CASE.memory())
    place(triton, CASE)
    times = torch.zeros(len(CASE.program.instructions), 3, dtype=torch.int64)
    triton.run(2, times)
    assert bool((times > 0).all()) and bool((times.diff(dim=1) >= 0).all())
    for number, ready in enumerate(times[:, 1].tolist()):
        for earlier in _before(number):
            assert times[earlier, 2] <= ready, (earlier, number)


def _before(number: int) -> list[int]:
    """Return the instructions that an instruction waits for, if counters mean all signals."""
    program = CASE.program
    numbers = []
    for wait in program.waits[number]:
        signals = [n for n, counters in enumerate(program.signals) if wait.counter in counters]
        numbers += signals if len(signals) == wait.until else []
    return numbers


def test_a_shape_that_a_tile_cannot_take() -> None:
    """The partial results of 65,536 spans of a head do not fit in registers."""
    program = CASE.program
    merge = next(merge for merge in program.instructions if isinstance(merge, AttentionReduce))
    branch_of(program, merge)
    wide = replace(merge, at=replace(merge.at, spans=65_536))
    with pytest.raises(UnsupportedError, match=r"Found 65,536 × \d+\. Expected at most 65,536"):
        branch_of(program, wide)


def test_a_state_that_a_tile_cannot_take() -> None:
    program = Case(HYBRID, lengths=(9,)).program
    step = next(step for step in program.instructions if isinstance(step, DeltaStep))
    branch_of(program, replace(step, at=replace(step.at, key=256, value=256)))
    wide = replace(step, at=replace(step.at, key=256, value=257))
    message = r"tile of delta_step.*Found 256 × 512\. Expected at most 65,536 values\. Compile with"
    with pytest.raises(UnsupportedError, match=message):
        branch_of(program, wide)


def test_a_single_extent_that_a_tile_cannot_take() -> None:
    program = CASE.program
    last = next(last for last in program.instructions if isinstance(last, Argmax))
    wide = replace(last, at=replace(last.at, slots=65_537))
    with pytest.raises(UnsupportedError, match=r"Found 131,072\. Expected at most 65,536"):
        branch_of(program, wide)
