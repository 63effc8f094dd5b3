"""The executor that runs a program as one Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from tpcompile.backends.executor import Executor, executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference.orders import Order
from tpcompile.backends.triton.branches import branch_of, check_dtype
from tpcompile.backends.triton.emit import Emitted, emit
from tpcompile.backends.triton.load import interpreted_library, load_kernels, tiles_package, triton
from tpcompile.errors import RankError, UnsupportedError, UsageError
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.encoding import encode_program
from tpcompile.vm.program.instruction import Probe
from tpcompile.vm.proof.verify import verify_program
from tpcompile.vm.targets import INT32_MAX


@executor
class Triton(Executor):
    """An executor that runs a program as one kernel, with a program of the grid per worker.

    On the CPU, Triton's interpreter runs the workers one after another. A worker whose wait is not
    met saves its place and returns, and the kernel is launched again. If no worker got further,
    the program is deadlocked, and the error names what each worker waits for.
    """

    name: ClassVar[str] = "triton"
    in_processes: ClassVar[bool] = False
    same_for_ranks: ClassVar[bool] = False

    @classmethod
    def prepare(cls) -> None:
        """Raise if Triton is missing or too old."""
        triton()

    @classmethod
    def check(cls, program: Program) -> None:
        """Raise unless all instructions have tiles, and all their values one dtype."""
        super().check(program)
        for one in program.instructions:
            branch_of(program, one)
        dtypes = {b.dtype for b in program.buffers if b.role == Role.WEIGHT}
        for dtype in dtypes:
            check_dtype(dtype)
        if len(dtypes) > 1:
            raise UnsupportedError(
                "The triton backend needs one dtype for all weights",
                got=", ".join(sorted(map(str, dtypes))),
            )

    def __init__(self, memory: StepMemory, verify: bool = True) -> None:
        """Emit and load the kernel.

        The program is verified again, because the kernel relies on it. `verify=False` is for tests
        of what happens without.
        """
        super().__init__(memory)
        if memory.share is not None:
            raise UnsupportedError(
                "The triton backend runs all ranks in one kernel, and not in processes",
                hint='Compile with backend="native" for ranks in processes',
            )
        program = memory.program
        if verify:
            verify_program(program)
        self.emitted: Emitted = emit(program, tiles_package(interpret=True))
        self._kernels = load_kernels(self.emitted.source, interpret=True)
        arrays = encode_program(program).arrays()
        self._arrays = {name: _never_empty(array) for name, array in arrays.items()}
        self._counters = torch.zeros(max(1, program.counters), dtype=torch.int64)
        self._workers = len(program.queues) * program.sharing
        self._scratch = torch.zeros(self._workers * self.emitted.scratch)
        self._before = 0
        self._failed = False

    def launch(self, steps: int, order: Order | None = None) -> int:
        """Launch the kernel until every worker has done its instructions of `steps` steps.

        `order` chooses the instructions of a step one by one, for tests of races.
        """
        if self._failed:
            raise UsageError(
                "A launch has failed or was interrupted, so the counters are unknown",
                hint="Compile the model again",
            )
        if self.memory.finished:
            return 0
        self._failed = True  # until the launch has ended
        grid = _Grid(self.memory.program, steps)
        if order is None:
            grid.quotas.fill_(INT32_MAX)
            while not grid.done:
                self._go_on(grid)
        else:
            for number in order(self.memory.program):
                grid.quotas.zero_()
                grid.quotas[grid.worker_at(number)] = 1
                self._go_on(grid)
        done = int(grid.last)
        self._before += done
        self._failed = False
        return done

    def _go_on(self, grid: _Grid) -> None:
        """Launch the kernel once. Raise if no worker gets further."""
        before = grid.turns.clone()
        grid.stuck.fill_(-1)
        with interpreted_library():
            self._kernels.megakernel[(self._workers,)](
                self._arrays["words"],
                self.emitted.branches,
                self.emitted.weights,
                self.memory.table(),
                *(self._arrays[name] for name in _LISTS),
                self._arrays["totals"],
                self._counters,
                grid.turns,
                grid.tickets,
                grid.quotas,
                grid.last,
                grid.stuck,
                self._scratch,
                self._before,
                SHARING=self.memory.program.sharing,
                SPINS=1,
            )
        if torch.equal(grid.turns, before) and not grid.done:
            raise RankError(
                "The program is deadlocked: no worker can go on", got="; ".join(grid.waiting())
            )

    def execute(self, number: int, probe: Probe) -> None:
        """Run one instruction, without waits and signals."""
        with interpreted_library():
            self._kernels.alone[(1,)](
                self._arrays["words"],
                self.emitted.branches,
                self.memory.table(),
                self._scratch,
                number,
            )


class _Grid:
    """The places of the workers during a launch of `steps` steps."""

    def __init__(self, program: Program, steps: int) -> None:
        self._program, sharing = program, program.sharing
        workers = torch.arange(len(program.queues) * sharing, dtype=torch.int32)
        self.turns = workers % sharing
        """The turn of each worker in its queue, counted over all steps."""
        self.tickets = torch.full((len(program.queues),), sharing, dtype=torch.int32)
        """The next turn of each queue that workers share."""
        self.quotas = torch.zeros_like(workers)
        """The instructions that each worker may take in the next launch."""
        self.last = torch.full((1,), steps, dtype=torch.int32)
        """The number of steps; a step in which all sequences end lowers it."""
        self.stuck = torch.zeros_like(workers)
        """The counter that each worker waits for, or -1."""
        self._lengths = torch.tensor([len(self._queue(worker)) for worker in workers.tolist()])

    def _queue(self, worker: int) -> Sequence[int]:
        return self._program.queues[worker // self._program.sharing]

    def _next(self, worker: int) -> int:
        """Return the instruction that a worker takes next."""
        queue = self._queue(worker)
        return queue[int(self.turns[worker]) % len(queue)]

    @property
    def _ended(self) -> torch.Tensor:
        """Whether each worker has done its instructions of all steps."""
        return (self._lengths == 0) | (self.turns // self._lengths.clamp(min=1) >= self.last)

    @property
    def done(self) -> bool:
        """Whether all workers have."""
        return bool(self._ended.all())

    def worker_at(self, number: int) -> int:
        """Return the worker that takes an instruction next."""
        going = (~self._ended).nonzero().flatten().tolist()
        found: int = next(worker for worker in going if self._next(worker) == number)
        return found

    def waiting(self, most: int = 8) -> list[str]:
        """Describe what the first workers that have not ended wait for."""
        instructions = self._program.instructions
        return [
            f"worker {worker} before {instructions[self._next(worker)].label} for counter "
            f"{int(self.stuck[worker])}"
            for worker in (~self._ended).nonzero().flatten().tolist()[:most]
        ]


_LISTS = (
    "queue_offsets",
    "queue_values",
    "wait_offsets",
    "wait_values",
    "signal_offsets",
    "signal_values",
)


def _never_empty(array: torch.Tensor) -> torch.Tensor:
    """Return an array, or one element if it is empty: a kernel needs an address."""
    return array if array.numel() else torch.zeros(1, dtype=array.dtype)
