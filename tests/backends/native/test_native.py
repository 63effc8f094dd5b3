"""Values and bits of every vector path, launches, and programs that have no kernels."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import tpcompile
from tests.backends.reference.stepping import (
    BIASED,
    EDGES,
    EVEN,
    Case,
    place,
    steps_of,
    steps_on,
    worst_error,
)
from tests.models import TOLERANCE, relative_error
from tpcompile.backends.native import Native, executor
from tpcompile.backends.native.build import paths
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.presets import preset
from tpcompile.vm.program import Role
from tpcompile.vm.schedule.policies import POLICIES

STEPS = 3
PATHS = paths()
CASE = Case("tiny-qwen3", tp=2, spans=3)


def _steps(case: Case, path: str | None = None, steps: int = STEPS) -> list[torch.Tensor]:
    native = Native(case.memory(), path)
    found = steps_on(native, case, steps)
    native.close()
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3", EVEN, BIASED])
def test_steps_are_eager_s(model: str, path: str) -> None:
    for lowering, interleaved in product(("heads", "rows"), (False, True)):
        case = Case(model, tp=2, spans=3, lowering=lowering, interleaved=interleaved)
        assert worst_error(case, _steps(case, path)) < TOLERANCE


@pytest.mark.parametrize("spans", [1, 2, 7])
@pytest.mark.parametrize("length", EDGES)
def test_one_sequence(length: int, spans: int) -> None:
    case = Case("tiny-qwen2", lengths=(length,), spans=spans)
    assert worst_error(case, _steps(case)) < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
def test_bits_do_not_depend_on_the_schedule(path: str) -> None:
    """Nor on the number of threads, which may be more than there are cores."""
    wanted = _steps(CASE, path)
    for policy, workers, lowering in product(POLICIES, (1, 2, 5), ("heads", "rows")):
        other = replace(CASE, policy=policy, workers=workers, lowering=lowering)
        found = _steps(other, path)
        assert all(map(torch.equal, found, wanted)), (policy, workers, lowering)


@pytest.mark.parametrize("path", PATHS)
def test_bits_do_not_depend_on_the_batch(path: str) -> None:
    """A sequence alone and as the first of up to 16, from its first token on."""
    alone = _steps(Case("tiny-qwen3", lengths=(1,)), path, 9)
    for batch in (2, 3, 5, 8, 16):
        found = _steps(Case("tiny-qwen3", lengths=(1,) * batch), path, 9)
        for step, logits in zip(alone, found, strict=True):
            assert torch.equal(step[0], logits[0]), batch


def test_tokens_of_a_launch_are_those_of_single_steps() -> None:
    one, many = (Native(CASE.memory()) for _ in range(2))
    place(one, CASE)
    place(many, CASE)
    single = torch.cat([one.run(1) for _ in range(8)])
    assert torch.equal(many.run(8), single)
    assert torch.equal(many.logits, one.logits)


def test_a_launch_ends_when_all_sequences_have_ended() -> None:
    case = Case("tiny-qwen3", lengths=(9, 3))
    free = Native(case.memory())
    place(free, case)
    tokens = free.run(8)
    native = Native(case.memory())
    place(native, case)
    native.place(
        *(native.memory.values(role)[0].clone() for role in (Role.TOKENS, Role.LENGTHS)),
        native.memory.values(Role.TABLES)[0].clone(),
        stops=sorted(set(tokens[2].tolist())),
    )
    found = native.run(8)
    assert len(found) <= 3
    assert native.memory.finished
    assert torch.equal(found[0], tokens[0])


def test_times_of_a_step() -> None:
    native = Native(CASE.memory())
    place(native, CASE)
    times = torch.zeros(len(CASE.program.instructions), 3, dtype=torch.int64)
    native.run(1, times)
    begin, ready, end = times.unbind(1)
    assert bool((begin > 0).all()) and bool((begin <= ready).all()) and bool((ready <= end).all())
    for number, waits in enumerate(CASE.program.waits):
        for wait in waits:
            before = CASE.program.signallers[wait.counter]
            if wait.until == len(before):
                assert ready[number] >= max(begin[early] for early in before)


def test_an_interrupted_launch_ends_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    native = Native(CASE.memory())
    place(native, CASE)
    real = executor.library()

    class Interrupted:
        """The library; its first wait is interrupted, as by Ctrl-C."""

        def __init__(self) -> None:
            self.waits = 0

        def tpc_wait(self, *args: Any) -> int:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            return int(real.tpc_wait(*args))

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    interrupted = Interrupted()
    monkeypatch.setattr(executor, "library", lambda: interrupted)
    with pytest.raises(KeyboardInterrupt):
        native.run(30)
    monkeypatch.undo()
    place(native, CASE)
    assert relative_error(steps_on(native, CASE, 1)[0], steps_of(CASE, 1)[0]) < TOLERANCE


def test_threads_end_with_the_executor() -> None:
    native = Native(CASE.memory())
    native.close()
    native.close()
    assert native.memory.tensors == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp", [1, 2])
def test_16_bits(dtype: torch.dtype, tp: int) -> None:
    """The error against fp32 is not above that of the reference machine by more than a half."""
    config = AutoConfig.for_model(**preset("tiny-qwen3"))
    prompt = torch.randint(1000, (2, 9), generator=torch.Generator().manual_seed(0))

    def logits(backend: str, of: torch.dtype) -> torch.Tensor:
        model = tpcompile.compile(
            config,
            tp,
            backend=backend,
            dtype=of,
            random_weights=0,
            max_seq_len=64,
            max_batch=2,
            simulate=True,
        )
        with model, torch.inference_mode():
            out = model(prompt, use_cache=True)
            token = torch.tensor([[5], [6]])
            found = []
            for _ in range(4):
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
                found.append(out.logits[:, -1].float())
            return torch.stack(found)

    exact = logits("reference", torch.float32)
    native, reference = (relative_error(logits(b, dtype), exact) for b in ("native", "reference"))
    assert native <= 1.5 * reference, (native, reference)


def test_a_path_that_is_not_here() -> None:
    with pytest.raises(UsageError, match="'avx1024' is not available on this CPU"):
        Native(CASE.memory(), "avx1024")


def test_an_instruction_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_OPCODES", range(1, 8))
    with pytest.raises(UnsupportedError, match="no kernel for AllReduce"):
        Native(CASE.memory())


def test_two_dtypes_are_refused() -> None:
    memory = CASE.memory()
    number = next(n for n, b in enumerate(memory.program.buffers) if b.name == "swiglu")
    buffers = list(memory.program.buffers)
    buffers[number] = replace(buffers[number], dtype=torch.bfloat16)
    memory.program = replace(memory.program, buffers=tuple(buffers))
    with pytest.raises(UnsupportedError, match=r"one dtype .*bf16 in swiglu"):
        Native(memory)


def test_the_library_refuses_unknown_paths() -> None:
    assert executor.library().tpc_path(99) is None
    assert ctypes.c_void_p(executor.library().tpc_open(None, b"nothing")).value is None
