"""Tests of all vector paths, of launches, and of programs without native kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import scripts
from tests.backends.programs import memory_of
from tests.backends.reference.step_models import (
    APART,
    BIASED,
    DELTA_APART,
    EVEN,
    EXPERTS,
    HYBRID_EXPERTS,
    INT4_EXPERTS,
    SHARED,
    WHOLE,
    WINDOWED,
    rotated_whole,
)
from tests.backends.reference.stepping import (
    EDGES,
    Case,
    place,
    schedules,
    steps_of,
    steps_on,
    worst_error,
)
from tests.models import NEXT, TOLERANCE, relative_error
from tpcompile.backends.executor import Executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.native import Native, checks, executor
from tpcompile.backends.native.build import paths
from tpcompile.backends.reference import Machine
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.vm.program import Role
from tpcompile.vm.program.buffer import LINEAR_STATES
from tpcompile.vm.program.instruction import WeightInstruction

pytestmark = pytest.mark.usefixtures("verified_once")

STEPS = 3
PATHS = paths()
CASE = Case("tiny-qwen3", tp=2, spans=3)


def _steps(case: Case, path: str | None = None, steps: int = STEPS) -> list[torch.Tensor]:
    native = Native(case.memory(), path)
    logits = steps_on(native, case, steps)
    native.close()
    return logits


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "model",
    [
        *("tiny-qwen2", "tiny-qwen3", "tiny-qwen3.5", NEXT, EVEN, BIASED, APART, DELTA_APART),
        *(EXPERTS, WHOLE, SHARED, HYBRID_EXPERTS, INT4_EXPERTS),
    ],
)
def test_steps_are_eager_s(model: str, path: str) -> None:
    for lowering, interleaved in product(("heads", "rows"), {False, rotated_whole(model)}):
        case = Case(model, tp=2, spans=3, lowering=lowering, interleaved=interleaved)
        assert worst_error(case, _steps(case, path)) < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["tiny-qwen3", EVEN, WINDOWED])
def test_a_cache_in_int8(model: str, path: str) -> None:
    """Steps are those of eager with the same rounding, for heads and for rows."""
    for tp, (lowering, interleaved) in zip(
        (1, 2, 3), (("heads", False), ("rows", True), ("heads", True)), strict=True
    ):
        case = Case(model, tp, spans=3, lowering=lowering, interleaved=interleaved, kv="int8")
        assert worst_error(case, _steps(case, path)) < TOLERANCE


@pytest.mark.parametrize("spans", [1, 2, 7])
@pytest.mark.parametrize("length", EDGES)
def test_one_sequence(length: int, spans: int) -> None:
    case = Case("tiny-qwen2", lengths=(length,), spans=spans)
    assert worst_error(case, _steps(case)) < TOLERANCE


BITS = pytest.mark.parametrize(
    ("model", "kv"),
    [
        *(("tiny-qwen3", "model"), ("tiny-qwen3", "int8"), ("tiny-qwen3.5", "model")),
        *((EXPERTS, "model"), (WHOLE, "model"), (SHARED, "model"), (INT4_EXPERTS, "model")),
    ],
)


@pytest.mark.parametrize("path", PATHS)
@BITS
def test_bits_do_not_depend_on_the_schedule(path: str, model: str, kv: str) -> None:
    """The logits are bitwise equal for all policies, lowerings and thread counts."""
    case = replace(CASE, model=model, kv=kv)
    wanted = _steps(case, path)
    for policy, workers, lowering in schedules((1, 2, 5)):
        other = replace(case, policy=policy, workers=workers, lowering=lowering)
        steps = _steps(other, path)
        assert all(map(torch.equal, steps, wanted)), (policy, workers, lowering)


@pytest.mark.parametrize("path", PATHS)
@BITS
def test_bits_do_not_depend_on_the_batch(path: str, model: str, kv: str) -> None:
    """A sequence has the same bits alone and in a batch of up to 16, from its first token on."""
    alone = _steps(Case(model, lengths=(1,), kv=kv), path, 9)
    for batch in (2, 3, 5, 8, 16):
        batched = _steps(Case(model, lengths=(1,) * batch, kv=kv), path, 9)
        for step, logits in zip(alone, batched, strict=True):
            assert torch.equal(step[0], logits[0]), batch


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", [EXPERTS, SHARED, HYBRID_EXPERTS, INT4_EXPERTS])
def test_bits_of_experts_do_not_depend_on_tp(path: str, model: str) -> None:
    """Each expert is split over the ranks, which hold whole partial sums of it."""
    alone, split = (_steps(Case(model, tp, lengths=(1, 1)), path, 9) for tp in (1, 2))
    assert all(map(torch.equal, alone, split))


def test_tokens_of_a_launch_are_those_of_single_steps() -> None:
    stepped, many = (Native(CASE.memory()) for _ in range(2))
    place(stepped, CASE)
    place(many, CASE)
    single = torch.cat([stepped.run(1) for _ in range(8)])
    assert torch.equal(many.run(8), single)
    assert torch.equal(many.logits, stepped.logits)


def test_a_launch_reads_one_state_and_writes_another() -> None:
    """It keeps the states that it reads, and stores those of the last step."""
    case = Case("tiny-qwen3.5", tp=2, lengths=(9, 1))
    read, write = torch.tensor([0, 1]), torch.tensor([3, 2])
    native, reference = Native(case.memory()), Machine(case.memory())
    for machine in (native, reference):
        place(machine, case, read=read, write=write)
    assert torch.equal(native.run(5), reference.run(5))
    before = case.memory()
    for role in LINEAR_STATES:
        sides = (memory.values(role) for memory in (native.memory, reference.memory, before))
        for actual, expected, old in zip(*sides, strict=True):
            assert relative_error(actual[:, 2:], expected[:, 2:]) < 1e-5
            assert torch.equal(actual[:, :2].nan_to_num(), old[:, :2].nan_to_num())


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
    stopped = native.run(8)
    assert len(stopped) <= 3
    assert native.memory.finished
    assert torch.equal(stopped[0], tokens[0])


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
        """Proxy of the library whose first wait raises KeyboardInterrupt."""

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
    memory = CASE.memory()
    before = threads()
    native = Native(memory)
    assert threads() == before + CASE.tp * CASE.workers
    native.close()
    native.close()
    assert threads() == before
    assert native.memory.tensors == []
    with pytest.raises(UsageError, match="closed"):
        native.launch(1)


def threads() -> int:
    """Return the number of OS threads of this process, including native ones."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_fork_ends_without_the_threads(tmp_path: Path) -> None:
    """A forked child neither waits for the threads, which it does not have, nor runs a step."""
    (tmp_path / "fork.py").write_text(FORK)
    done = scripts.run([str(tmp_path / "fork.py")])
    assert (done.returncode, done.stdout) == (0, "child True\nparent 0\n"), done.stderr


FORK = """
import os
from tests.backends.reference.stepping import Case
from tpcompile.backends.native import Native
from tpcompile.errors import UsageError
native = Native(Case("tiny-qwen3").memory())
if child := os.fork():
    _, status = os.waitpid(child, 0)
    print("parent", status)
else:
    try:
        native.launch(1)
    except UsageError as error:
        print("child", "forked from it" in str(error), flush=True)
    del native
"""


@lru_cache
def _reference(dtype: torch.dtype, odd: bool) -> torch.Tensor:
    return _first_steps(Machine(_memory(dtype, 1, 2, odd)), 2)


def _memory(dtype: torch.dtype, tp: int, batch: int, odd: bool) -> StepMemory:
    return memory_of("tiny-qwen3", dtype, tp, batch, odd=odd)


def _first_steps(executor: Executor, batch: int, steps: int = 5) -> torch.Tensor:
    """Return the logits of the first tokens of `batch` sequences, in fp32."""
    logits, tables = [], torch.arange(2 * batch).view(batch, 2)
    for step in range(steps):
        tokens = torch.arange(batch) * 7 + step
        executor.place(tokens, torch.full((batch,), step + 1), tables)
        executor.run(1)
        logits.append(executor.logits.float())
    executor.close()
    return torch.stack(logits)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [False, True])
def test_16_bits(dtype: torch.dtype, path: str, odd: bool) -> None:
    """The error relative to fp32 is at most 1.5 times that of the reference machine."""
    exact, reference = _reference(torch.float32, odd), _reference(dtype, odd)
    logits = _first_steps(Native(_memory(dtype, 2, 2, odd), path), 2)
    assert relative_error(logits, exact) <= 1.5 * relative_error(reference, exact)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_of_16_bits_do_not_depend_on_batch_and_ranks(dtype: torch.dtype, path: str) -> None:
    alone = _first_steps(Native(_memory(dtype, 1, 1, True), path), 1)
    for batch in (3, 6, 12, 17):
        logits = _first_steps(Native(_memory(dtype, 1, batch, True), path), batch)
        assert torch.equal(logits[:, :1], alone), batch
    even = _first_steps(Native(_memory(dtype, 1, 2, False), path), 2)
    for tp in (2, 4):
        assert torch.equal(_first_steps(Native(_memory(dtype, tp, 2, False), path), 2), even), tp


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [{"hidden": 3103}, {"wide": 4007}], ids=["long", "leaves"])
def test_bits_of_long_rows_do_not_depend_on_the_batch(
    widths: dict[str, int], dtype: torch.dtype, path: str
) -> None:
    """Each kernel adds in the same order, and rounds a product and its sum once or always twice.

    Columns are multiplied in one pass, in two, or in more, by the number of sequences. With many
    columns, rows of one and of two sequences come in blocks too.
    """

    def steps(batch: int) -> torch.Tensor:
        memory = memory_of("tiny-qwen3", dtype, 1, batch, **widths)
        return _first_steps(Native(memory, path), batch, steps=2)

    most = steps(40)
    for batch in (1, 2, 3, 4, 5, 6, 7, 9, 20):
        assert torch.equal(steps(batch), most[:, :batch]), batch


def test_first_weights_are_where_each_instruction_reads_first() -> None:
    """The rows, and with split columns the columns too."""
    case = Case("biased", tp=2, lengths=(5,), column_splits=2)
    memory = case.memory()
    native = Native(memory)
    for instruction, address in zip(
        case.program.instructions, native.first_weights.tolist(), strict=True
    ):
        if isinstance(instruction, WeightInstruction):
            number = instruction.at.weight
            (row, _), (column, _) = next(
                box for buffer, box in instruction.reads if buffer == number
            )
            assert address == memory.tensors[number][row, column].data_ptr()
        else:
            assert address == 0
    native.close()


def test_a_path_that_is_not_here() -> None:
    with pytest.raises(UsageError, match="'avx1024' is not available on this CPU"):
        Native(CASE.memory(), "avx1024")


def test_an_instruction_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_kernel", lambda path, dtype, opcode, *formats: opcode < 8)
    with pytest.raises(UnsupportedError, match="no kernel for all_reduce"):
        Native(CASE.memory())


def _with_dtype(case: Case, name: str, dtype: torch.dtype) -> StepMemory:
    """Return the memory of a program whose buffers of a name have another dtype."""
    memory = case.memory()
    changed = [b.name.endswith(name) for b in memory.program.buffers]
    assert any(changed)
    pairs = zip(memory.program.buffers, changed, strict=True)
    buffers = tuple(replace(buffer, dtype=dtype) if named else buffer for buffer, named in pairs)
    memory.program = replace(memory.program, buffers=buffers)
    return memory


@pytest.mark.parametrize(("name", "lowering"), [("logits", "heads"), ("raw_qkv", "rows")])
def test_two_dtypes_of_values_are_refused(name: str, lowering: str) -> None:
    """A buffer that all instructions share, and one that an instruction has for itself."""
    memory = _with_dtype(replace(CASE, lowering=lowering, workers=6), name, torch.bfloat16)
    with pytest.raises(UnsupportedError, match=rf"one dtype .*bf16 in {name}"):
        Native(memory)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embed_tokens_weight", "f32 values with bf16 weights"),
        ("down_proj_weight", "f32 values with bf16 weights"),
        ("post_attention_layernorm_weight", "f32 values with f32 weights, bf16 norms and biases"),
        ("cache", "f32 values with .*bf16 cache"),
    ],
)
def test_dtypes_without_a_kernel_are_refused(name: str, message: str) -> None:
    """The dtypes of values, weights, norms and caches are independent."""
    with pytest.raises(UnsupportedError, match=rf"no kernel for .*{message}"):
        Native(_with_dtype(CASE, name, torch.bfloat16))


def test_the_library_refuses_unknown_paths() -> None:
    assert executor.library().tpc_path(99) is None
    assert executor.library().tpc_open(None, None) is None
