"""The executor that runs a program as one Triton kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from tpcompile.backends.executor import Executor, executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference.orders import Order
from tpcompile.backends.rotation import CPU
from tpcompile.backends.triton.branches import branch_of, check_dtype
from tpcompile.backends.triton.emit import Emitted, emit
from tpcompile.backends.triton.gpu import check_gpu, check_shared
from tpcompile.backends.triton.grid import Grid
from tpcompile.backends.triton.load import interpreted_library, load_kernels, tiles_package, triton
from tpcompile.backends.triton.options import COMPILED, LAUNCHED, SPINS
from tpcompile.errors import RankError, UnsupportedError, UsageError
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.buffer import STORED_DIMS
from tpcompile.vm.program.encoding import encode_program, first_weights
from tpcompile.vm.program.instruction import Probe
from tpcompile.vm.proof.verify import verify_program


@executor
class Triton(Executor):
    """An executor that runs a program as one kernel, with a program of the grid per worker.

    On a GPU, each worker has an SM, and waits in the kernel. On the CPU, Triton's interpreter runs
    the workers one after another: a worker whose wait is not met saves its place and returns, and
    the kernel is launched again. If no worker makes progress, the program is deadlocked, and the
    error names the waits of workers. On a GPU, this happens after a bounded number of polls.
    """

    name: ClassVar[str] = "triton"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    in_processes: ClassVar[bool] = False
    in_formats: ClassVar[bool] = True
    same_for_ranks: ClassVar[bool] = False
    size_parts: ClassVar[int] = 4  # a kernel takes seconds to compile
    takes_times: ClassVar[bool] = True

    @classmethod
    def prepare(cls) -> None:
        """Raise if Triton is missing or too old."""
        triton()

    @classmethod
    def check(cls, program: Program, device: torch.device = CPU) -> None:
        """Raise unless the GPU has room for all workers, and all instructions have tiles."""
        super().check(program, device)
        if device.type == "cuda":
            check_gpu(program, torch.cuda.get_device_properties(device))
        for instruction in program.instructions:
            branch_of(program, instruction)
        weights = (buffer for buffer in program.buffers if buffer.role == Role.WEIGHT)
        dtypes = {buffer.dtype for buffer in weights if buffer.format is None}
        for dtype in dtypes:
            check_dtype(dtype)
        if len(dtypes) > 1:
            raise UnsupportedError(
                "The triton backend needs one dtype for all weights",
                got=", ".join(sorted(map(str, dtypes))),
            )

    def __init__(self, memory: StepMemory, verify: bool = True) -> None:
        """Emit and load the kernel; on a GPU, compile it.

        The program is verified again, because the kernel relies on it. `verify=False` is for tests
        of invalid programs.
        """
        super().__init__(memory)
        if memory.share is not None:
            raise UnsupportedError(
                "The triton backend runs all ranks in one kernel, and not in processes",
                hint='Compile with backend="native" for ranks in processes',
            )
        program, device = memory.program, memory.device
        if verify:
            verify_program(program)
        self._interpreted = device.type == "cpu"
        self.emitted: Emitted = emit(program, tiles_package(self._interpreted))
        self._kernels = load_kernels(self.emitted.source, self._interpreted)
        self._arrays = {
            name: _never_empty(array).to(device)
            for name, array in (
                *encode_program(program).arrays().items(),
                ("branches", self.emitted.branches),
                ("weights", first_weights(program)),
            )
        }
        self._counters = torch.zeros(max(1, program.counters), dtype=torch.int64, device=device)
        self._grid = Grid(program, device)
        self._scratch = torch.empty(0, device=device)
        self._own_scratch(self._grid.workers)
        self._no_times = torch.zeros(1, dtype=torch.int64, device=device)
        self._placed: tuple[Any, ...] = ()
        self._failed = False
        if not self._interpreted:
            self._compile()

    def launch(self, steps: int, option: Order | torch.Tensor | None = None) -> int:
        """Launch the kernel until every worker has done its instructions of `steps` steps.

        `option` may be an int64 tensor `[instructions, 3]`. It receives the times in ns at which
        each instruction of the last step was taken, became ready and was done, before its signals.
        Or it is an order, which chooses the instructions of a step one by one in tests of races.
        """
        if self._failed:
            raise UsageError(
                "A launch has failed or was interrupted, so the counters are unknown",
                hint="Compile the model again",
            )
        if self.memory.finished:
            return 0
        self._failed = True  # until the launch has ended
        self._grid.begin(steps)
        times = option.to(self.memory.device) if isinstance(option, torch.Tensor) else None
        if callable(option):
            for number in option(self.memory.program):
                self._grid.allow_only(self._grid.worker_at(number))
                self._go_on(None)
        else:
            while not self._grid.done:
                self._go_on(times)
        done = self._grid.end()
        if isinstance(option, torch.Tensor) and times is not None:
            option.copy_(times)
        self._failed = False
        return done

    def execute(self, number: int, probe: Probe) -> None:
        """Run one instruction, without waits and signals."""
        self.launch_together(torch.tensor([number], dtype=torch.int32, device=self.memory.device))

    def launch_together(self, numbers: torch.Tensor) -> None:
        """Run independent instructions at the same time, without waits and signals.

        `numbers` is int32, on the device. The inputs must have been uploaded.
        """
        self._own_scratch(len(numbers))
        arrays, table = self._arrays, self._table()
        with self._context():
            self._kernels.together[(len(numbers),)](
                arrays["words"],
                arrays["branches"],
                table,
                self._scratch,
                numbers,
                **({} if self._interpreted else COMPILED),
            )

    def _go_on(self, times: torch.Tensor | None) -> None:
        """Launch the kernel once. Raise if no worker makes progress."""
        arguments = self._arguments(times)
        self._grid.upload()
        with self._context():
            self._kernels.megakernel[(self._grid.workers,)](
                **arguments, **({} if self._interpreted else LAUNCHED)
            )
            further = self._grid.download()
        if not further:
            raise RankError(
                "The program is deadlocked: no worker can go on",
                got="; ".join(self._grid.waiting()),
            )

    def _compile(self) -> None:
        """Compile the kernel for the GPU, and check that it fits."""
        device = self.memory.device
        with self._context():
            compiled = self._kernels.megakernel.warmup(
                **self._arguments(None), grid=(self._grid.workers,), **LAUNCHED
            )
        check_shared(int(compiled.metadata.shared), torch.cuda.get_device_properties(device))

    def _arguments(self, times: torch.Tensor | None) -> dict[str, Any]:
        return {
            **self._arrays,
            **self._grid.arguments(),
            "buffers": self._table(),
            "counters": self._counters,
            "scratch": self._scratch,
            "times": self._no_times if times is None else times,
            "SHARING": self.memory.program.sharing,
            "SPINS": 1 if self._interpreted else SPINS,
            "TIMED": times is not None,
        }

    def _context(self) -> AbstractContextManager[Any]:
        """Return the context in which kernels are launched."""
        if self._interpreted:
            return interpreted_library()
        return torch.cuda.device(self.memory.device)

    def _table(self) -> torch.Tensor:
        """Return the table of buffers on the device. Only caches and states may change."""
        roles = self.memory.program.roles.intersection(STORED_DIMS)
        tensors = [tensor for role in sorted(roles) for tensor in self.memory.values(role)]
        placed = tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)
        if placed != self._placed:
            self._placed, self._buffers = placed, self.memory.table().to(self.memory.device)
        return self._buffers

    def _own_scratch(self, workers: int) -> None:
        """Allocate the scratch memory of the workers, unless there is enough."""
        needed = workers * self.emitted.scratch
        if self._scratch.numel() < needed:
            self._scratch = torch.zeros(needed, device=self.memory.device)


def _never_empty(array: torch.Tensor) -> torch.Tensor:
    """Return an array, or one element if it is empty: a kernel needs an address."""
    return array if array.numel() else torch.zeros(1, dtype=array.dtype)
