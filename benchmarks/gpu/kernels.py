"""Our sides: the megakernel, and the same tile bodies as kernels of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.clock import elapsed_ms, finish
from tpcompile.backends.devices import machine_of
from tpcompile.backends.measuring import RandomMemory, place_full
from tpcompile.backends.triton import Triton
from tpcompile.scheduling import schedule
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import WeightInstruction
from tpcompile.vm.proof.dependencies import dependencies
from tpcompile.vm.schedule.policies import depths


@dataclass(frozen=True)
class Shape:
    """A decode step to run: the model, and the tokens of each sequence before a burst of steps."""

    model: str
    context: int
    steps: int
    batch: int = 1
    policy: str | None = None
    workers: int | None = None

    def program(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Program:
        """Return the verified program for a device."""
        scheduled = schedule(
            f"preset:{self.model}",
            target=machine_of(device),
            workers=self.workers,
            dtype=dtype,
            policy=self.policy,
            batch=self.batch,
            context=self.context,
            max_seq_len=self.context + self.steps,
        )
        return scheduled.program


def bytes_of(program: Program, context: int, batch: int = 1) -> int:
    """Return the bytes of weights and of a batch's cache that a step must read."""
    weights = sum(
        instruction.traffic
        for instruction in program.instructions
        if isinstance(instruction, WeightInstruction)
    )
    cache = next(b for b in program.buffers if b.role.kind == "cache")
    assert cache.storage is not None
    layers, two, _, heads, width = cache.storage
    return weights + layers * two * heads * width * context * batch * cache.dtype.itemsize


class Megakernel:
    """A burst of steps in one launch of the kernel."""

    name = "tpcompile"

    def __init__(self, shape: Shape, program: Program, random: RandomMemory) -> None:
        self._shape, self._device = shape, random.device
        self.executor = Triton(random.memory(program))
        self.burst()

    def burst(self) -> float:
        """Run the steps; return the milliseconds per step, with all transfers."""
        place_full(self.executor, self._shape.context)
        steps = self._shape.steps
        return elapsed_ms(self._device, lambda: self.executor.run(steps)) / steps

    def close(self) -> None:
        """Release the memory."""
        self.executor.close()


class TileGraph:
    """The same instructions, level by level of their dependencies: a kernel per level.

    On a GPU the kernels of a step are a CUDA graph.
    """

    name = "tiles, CUDA graph"

    def __init__(self, shape: Shape, program: Program, random: RandomMemory) -> None:
        self._shape, self._device = shape, random.device
        self.executor = Triton(random.memory(program))
        self._levels = [
            torch.tensor(level, dtype=torch.int32, device=self._device)
            for level in levels_of(program)
        ]
        self._begin()
        self._step()  # compiles the kernel and allocates its scratch memory
        finish(self._device)
        self._replay = self._step
        if self._device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            self._begin()
            with torch.cuda.graph(graph):
                self._step()
            self._replay = graph.replay
        self.burst()

    def burst(self) -> float:
        """Run the steps; return the milliseconds per step."""
        self._begin()
        steps = self._shape.steps
        return elapsed_ms(self._device, lambda: [self._replay() for _ in range(steps)]) / steps

    def close(self) -> None:
        """Release the memory."""
        self.executor.close()

    def _begin(self) -> None:
        place_full(self.executor, self._shape.context)
        self.executor.memory.begin(self._shape.steps)
        self.executor.memory.upload()

    def _step(self) -> None:
        for level in self._levels:
            self.executor.launch_together(level)


def levels_of(program: Program) -> list[Sequence[int]]:
    """Return the instructions by the length of the longest chain of dependencies before them."""
    levels: dict[int, list[int]] = {}
    for number, depth in enumerate(depths(dependencies(program.instructions))):
        levels.setdefault(depth, []).append(number)
    return [levels[depth] for depth in sorted(levels)]
