"""Faults around a launch: weights that are NaN, Ctrl-C, one core, wrong tables."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tpcompile
from tests import scripts
from tests.backends.programs import memory_of
from tests.backends.reference.stepping import Case, place
from tests.models import long_config
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.native import Native
from tpcompile.backends.native.build import paths
from tpcompile.backends.reference import Machine
from tpcompile.errors import UsageError
from tpcompile.vm.program import Role
from tpcompile.vm.program.abi import column_offsets

CASE = Case("tiny-qwen3", tp=2, lengths=(9, 3))
MANY = 4000


def _spoil(memory: StepMemory, name: str, rows: slice) -> None:
    """Make rows of a weight NaN on every rank."""
    for number, buffer in enumerate(memory.program.buffers):
        if buffer.role == Role.WEIGHT and name in buffer.name:
            memory.tensors[number] = memory.tensors[number].clone()
            memory.tensors[number][rows] = torch.nan


NAN = {
    "a row of the vocabulary": ("embed_tokens", slice(17, 18)),
    "a norm": ("l1_input_layernorm", slice(0, 1)),
    "values and keys": ("l0_q_k_v", slice(40, None)),
    "gate and up": ("l0_gate_up", slice(3, 4)),
}


@pytest.mark.parametrize("fault", NAN)
def test_tokens_of_weights_that_are_no_numbers(fault: str) -> None:
    """Those of the reference machine, on any path and number of threads. NaN is the best logit."""
    machine = Machine(CASE.memory())
    _spoil(machine.memory, *NAN[fault])
    place(machine, CASE)
    wanted = machine.run(4)
    assert bool(torch.isnan(machine.logits).any())
    for workers, path in ((1, paths()[0]), (3, paths()[-1]), (4, paths()[0])):
        case = replace(CASE, workers=workers)
        memory = case.memory()
        _spoil(memory, *NAN[fault])
        native = Native(memory, path, delays=workers)
        place(native, case)
        assert torch.equal(native.run(4), wanted)
        assert torch.equal(torch.isnan(native.logits), torch.isnan(machine.logits))
        native.close()


def test_one_core(tmp_path: Path) -> None:
    """One worker, and more than a core can run at once; the process may use one core only."""
    (tmp_path / "one_core.py").write_text(ONE_CORE)
    done = scripts.run([str(tmp_path / "one_core.py")], timeout=300)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


ONE_CORE = """
import os, torch
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tests.backends.reference.stepping import Case, place
from tpcompile.backends.native import Native
found = []
for workers in (1, 8):
    case = Case("tiny-qwen3", workers=workers)
    native = Native(case.memory())
    place(native, case)
    native.run(4)
    found.append(native.logits)
print(torch.equal(*found))
"""


def _long() -> Native:
    """Return an executor in front of a launch that takes seconds."""
    native = Native(
        memory_of("tiny-qwen3", torch.float32, 1, 1, longest=MANY + 8, steps=MANY), delays=1
    )
    _begin(native)
    return native


def _begin(native: Native) -> None:
    tables = torch.arange(MANY // 4 + 2)[None]
    native.place(torch.tensor([5]), torch.tensor([1]), tables)


def _ctrl_c(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_ctrl_c_ends_a_launch_after_a_step() -> None:
    native = _long()
    tokens = native.run(20)
    _begin(native)
    timer = _ctrl_c(0.2)
    with pytest.raises(KeyboardInterrupt):
        native.run(MANY)
    timer.join()
    ran = int(native.memory.values(Role.CLOCK)[0])
    assert 1 <= ran < MANY
    assert int(native.memory.values(Role.LENGTHS)[0]) == 1 + ran
    _begin(native)
    assert torch.equal(native.run(20), tokens)
    native.close()


def test_ctrl_c_leaves_a_model_that_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[threading.Timer] = []
    run = Native.launch

    def launch(self: Native, steps: int, *options: object) -> int:
        if interrupts and not timers:
            timers.append(_ctrl_c(0.02))
        return run(self, steps, *options)

    interrupts = False
    monkeypatch.setattr(Native, "launch", launch)
    ids = torch.tensor([[5, 9, 2, 7]])
    with tpcompile.compile(
        long_config(),
        tp=2,
        simulate=True,
        backend="native",
        random_weights=0,
    ) as model:
        wanted = model.generate(ids, max_new_tokens=9, min_new_tokens=9)
        interrupts = True
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, max_new_tokens=2000, min_new_tokens=2000)
        timers[0].join()
        assert torch.equal(model.generate(ids, max_new_tokens=9, min_new_tokens=9), wanted)


def _without(memory: StepMemory, change: Callable[[torch.Tensor], None]) -> StepMemory:
    table = memory.table()
    change(table)
    memory.table = lambda: table  # type: ignore[method-assign]
    return memory


@pytest.mark.parametrize("column", column_offsets())
def test_a_wrong_column_of_the_table_is_refused(column: str) -> None:
    memory = CASE.memory()
    number = next(n for n, b in enumerate(memory.program.buffers) if b.role == Role.CACHE)

    def change(table: torch.Tensor) -> None:
        table[number, column_offsets()[column]] += 1

    with pytest.raises(UsageError, match=rf"table of buffers .*{column} of the buffer cache"):
        Native(_without(memory, change))


def test_a_tensor_of_another_dtype_is_refused() -> None:
    memory = CASE.memory()
    number = memory.program.one_per_rank(Role.LOGITS)[0]
    memory.tensors[number] = memory.tensors[number].bfloat16()
    with pytest.raises(UsageError, match=r"buffer logits of rank 0.*in torch\.bfloat16"):
        Native(memory)


@pytest.mark.parametrize("times", [torch.zeros(1, 3, dtype=torch.int64), torch.zeros(9999, 3)])
def test_times_of_another_shape_are_refused(times: torch.Tensor) -> None:
    native = Native(CASE.memory())
    place(native, CASE)
    with pytest.raises(UsageError, match="three per instruction"):
        native.run(1, times)
    native.close()


def test_a_launch_of_steps_with_two_ends_is_refused() -> None:
    """Lengths would grow by two per step, past the blocks of a sequence."""
    case = replace(CASE, tp=1, workers=1)
    instructions = case.program.instructions
    program = replace(case.program, instructions=(*instructions[:-2], *instructions[-1:] * 2))
    memory = case.memory()
    with pytest.raises(UsageError, match="One instruction of a rank must end a step"):
        StepMemory(program, lambda *key: torch.empty(0), case.rotation, memory.values(Role.CACHE))


def test_sequences_that_have_ended_need_their_blocks() -> None:
    """Their attention is still computed, so a smaller cache must have them."""
    case = replace(CASE, tp=1)
    memory = case.memory()
    native = Native(memory)
    place(native, case, ended=torch.tensor([True, False]))
    number = memory.program.one_per_rank(Role.CACHE)[0]
    buffer, cache = memory.program.buffers[number], memory.tensors[number]
    extents = (*cache.shape[:2], 4 * memory.block, *cache.shape[3:])
    memory.use_caches([torch.empty_strided(extents, buffer.strides(extents)).zero_()])
    with pytest.raises(UsageError, match="Sequence 0 lacks blocks"):
        native.run(1)
    native.close()
