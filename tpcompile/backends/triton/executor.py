"""The executor that runs a program as one Triton kernel."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tpcompile.backends.executor import Executor, executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.triton.branches import branch_of, check_dtype
from tpcompile.backends.triton.emit import Emitted, emit
from tpcompile.backends.triton.load import interpreted_library, load_kernels, tiles_package, triton
from tpcompile.errors import RankError, UnsupportedError
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.encoding import encode_program
from tpcompile.vm.program.instruction import Probe


@executor
class Triton(Executor):
    """An executor that runs a program as one kernel, with a program of the grid per worker.

    On the CPU, Triton's interpreter runs the workers one after another. A worker whose wait is not
    met saves its place and returns, and the kernel is launched again. If no worker got further,
    the program is deadlocked, and the error names what each worker waits for.
    """

    name: ClassVar[str] = "triton"
    in_processes: ClassVar[bool] = False

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

    def __init__(self, memory: StepMemory) -> None:
        super().__init__(memory)
        if memory.share is not None:
            raise UnsupportedError(
                "The triton backend runs all ranks in one kernel, and not in processes",
                hint='Compile with backend="native" for ranks in processes',
            )
        program = memory.program
        self.emitted: Emitted = emit(program, tiles_package(interpret=True))
        self._kernels = load_kernels(self.emitted.source, interpret=True)
        self._arrays = _arrays(program)
        self._workers = len(program.queues) * program.sharing
        self._counters = torch.zeros(max(1, program.counters), dtype=torch.int64)
        self._scratch = torch.zeros(self._workers * self.emitted.scratch)
        self._before = 0

    def launch(self, steps: int, *options: Any) -> int:
        """Launch the kernel until every worker has done its instructions of `steps` steps."""
        program, sharing = self.memory.program, self.memory.program.sharing
        last = torch.full((1,), steps, dtype=torch.int32)
        if self.memory.finished:
            return 0
        workers = torch.arange(self._workers, dtype=torch.int32)
        turns = workers % sharing if sharing > 1 else torch.zeros_like(workers)
        tickets = torch.full((len(program.queues),), sharing, dtype=torch.int32)
        stuck = torch.full((self._workers,), -1, dtype=torch.int32)
        table = self.memory.table()
        lengths = torch.tensor([len(queue) for queue in program.queues for _ in range(sharing)])
        while True:
            before = turns.clone()
            stuck.fill_(-1)
            with interpreted_library():
                self._kernels.megakernel[(self._workers,)](
                    self._arrays["words"],
                    self.emitted.branches,
                    self.emitted.weights,
                    table,
                    *(self._arrays[name] for name in _LISTS),
                    self._arrays["totals"],
                    self._counters,
                    turns,
                    tickets,
                    last,
                    stuck,
                    self._scratch,
                    self._before,
                    SHARING=sharing,
                    SPINS=1,
                )
            done = (lengths == 0) | (turns // lengths.clamp(min=1) >= int(last))
            if bool(done.all()):
                break
            if torch.equal(turns, before):
                raise self._deadlock(turns, stuck, done)
        self._before += int(last)
        return int(last)

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

    def _deadlock(self, turns: torch.Tensor, stuck: torch.Tensor, done: torch.Tensor) -> RankError:
        """Return the error that names the instruction and the counter of each waiting worker."""
        program = self.memory.program
        found = []
        for worker in (~done).nonzero().flatten().tolist():
            queue = program.queues[worker // program.sharing]
            number = queue[int(turns[worker]) % len(queue)]
            label = program.instructions[number].label
            found.append(f"worker {worker} before {label} for counter {int(stuck[worker])}")
        return RankError("The program is deadlocked: no worker can go on", got="; ".join(found[:8]))


_LISTS = (
    "queue_offsets",
    "queue_values",
    "wait_offsets",
    "wait_values",
    "signal_offsets",
    "signal_values",
)


def _arrays(program: Program) -> dict[str, torch.Tensor]:
    """Return the arrays of a program by the names of the kernel's arguments."""
    encoded = encode_program(program)
    found = {"words": encoded.words, "totals": encoded.totals}
    for name in ("queue", "wait", "signal"):
        lists = getattr(encoded, f"{name}s")
        found |= {f"{name}_offsets": lists.offsets, f"{name}_values": lists.values}
    return {name: _never_empty(array.contiguous()) for name, array in found.items()}


def _never_empty(array: torch.Tensor) -> torch.Tensor:
    """Return an array, or one element if it is empty: a kernel needs an address."""
    return array if array.numel() else torch.zeros(1, dtype=array.dtype)
