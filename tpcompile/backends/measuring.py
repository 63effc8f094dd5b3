"""Measured steps of programs in this process, on memory with random contents."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tpcompile.backends.devices import FASTEST
from tpcompile.backends.executor import Executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.rotation import CPU, Rotation
from tpcompile.huge_pages import allocated
from tpcompile.ir.kv import is_rounded, stored_rows
from tpcompile.vm.program import Program, Role
from tpcompile.vm.schedule.measured import MeasuredSteps, measured_step

REPEATS = 20
_PATTERN = 1 << 20
_SPREAD = 0.02


class RandomMemory:
    """Weights with random contents, which programs of one model share.

    One pattern fills all tensors, and tensors of integers get its bytes: the times of kernels do
    not depend on the values. In 8-bit floating point they do: kernels are faster for numbers with a
    leading one. So the pattern is stretched to its range, as that of a block is in a checkpoint.
    The pages are as those of ranks, because the rate of reading depends on them.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self._pattern = (torch.randn(_PATTERN, generator=generator) * _SPREAD).to(device)
        self._weights: dict[tuple[int, str, tuple[int, ...]], torch.Tensor] = {}

    def memory(self, program: Program) -> StepMemory:
        """Return memory for a program, with a full cache."""
        tensors = {
            (buffer.rank, buffer.name + part.suffix): (buffer, part)
            for buffer in program.buffers
            if buffer.role == Role.WEIGHT
            for part in buffer.stored.components
        }

        def parameter(rank: int, name: str) -> torch.Tensor:
            buffer, part = tensors[rank, name]
            extents = buffer.extents if buffer.format is None else buffer.extents_of(part)
            return self._weight((rank, name, extents), part.dtype.torch)

        memory = StepMemory(
            program, parameter, _rotation(program), poison=False, device=self.device
        )
        for number in program.one_per_rank(Role.CACHE):
            storage = program.buffers[number].storage
            assert storage is not None
            cache = memory.tensors[number]
            self._fill(cache, self._rows(cache, storage[-1]) if is_rounded(cache) else None)
        return memory

    def _rows(self, cache: torch.Tensor, width: int) -> torch.Tensor:
        """Return rows of a cache with values of the pattern, one after the other."""
        count = max(1, _PATTERN // width)
        values = self._pattern.repeat(-(-width // _PATTERN))[: count * width]
        return stored_rows(values.view(count, width), cache).flatten()

    def _weight(self, key: tuple[int, str, tuple[int, ...]], dtype: torch.dtype) -> torch.Tensor:
        if key not in self._weights:
            self._weights[key] = self._fill(allocated(key[2], dtype, self.device))
        return self._weights[key]

    def _fill(self, tensor: torch.Tensor, pattern: torch.Tensor | None = None) -> torch.Tensor:
        """Write every element, so that the system provides the pages."""
        flat = tensor.as_strided((tensor.numel(),), (1,))
        if pattern is None:
            floats = self._pattern
            if tensor.dtype == torch.float8_e4m3fn:
                floats = floats * (torch.finfo(tensor.dtype).max / floats.abs().max())
            pattern = floats if tensor.is_floating_point() else floats.view(tensor.dtype)[:_PATTERN]
        for start in range(0, len(flat), len(pattern)):
            part = flat[start : start + len(pattern)]
            part.copy_(pattern[: len(part)])
        return tensor


def _rotation(program: Program) -> Rotation:
    buffer = program.buffers[program.one_per_rank(Role.COS)[0]]
    table = torch.full(buffer.extents, math.sqrt(0.5), dtype=buffer.dtype)
    return table, table


def place_full(executor: Executor, length: int) -> None:
    """Place a full batch of sequences of `length` tokens, each in blocks of its own.

    Their new tokens differ as far as the vocabulary allows, since equal ones choose equal experts.
    """
    memory = executor.memory
    batch, blocks = memory.batch, memory.extent(Role.TABLES, 1)
    tables = torch.arange(batch * blocks).view(batch, blocks)
    executor.place(torch.arange(batch) % memory.vocabulary, torch.full((batch,), length), tables)


def measure(
    program: Program,
    context: int,
    *,
    repeats: int = REPEATS,
    random: RandomMemory | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> MeasuredSteps:
    """Run steps in which every sequence of the batch has `context` tokens, and time them.

    Each measured step follows another one, so the threads are awake. All ranks of the program run
    in this process. `random` holds the weights, for further programs of the same model too, and the
    device.
    """
    random = random or RandomMemory()
    executor = FASTEST[random.device.type](random.memory(program))
    try:
        first = max(1, context - 1)
        steps = []
        for done in range(repeats):
            place_full(executor, first)
            times = torch.zeros(len(program.instructions), 3, dtype=torch.int64)
            executor.run(context - first + 1, times)
            steps.append(measured_step(program, times))
            progress(done + 1)
    finally:
        executor.close()
    return MeasuredSteps(program, steps)
