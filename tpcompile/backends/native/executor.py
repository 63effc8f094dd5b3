"""The native executor."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from tpcompile.backends.executor import Executor, executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.native.asleep import asleep
from tpcompile.backends.native.build import kernels, library, paths
from tpcompile.backends.native.checks import check_kernels, check_table, check_times, dtype_of
from tpcompile.backends.rotation import CPU
from tpcompile.backends.share import board_size
from tpcompile.errors import RankError, UnsupportedError, UsageError, VerifyError, did_you_mean
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.abi import buffer_row, column_offsets
from tpcompile.vm.program.buffer import STORED_DIMS
from tpcompile.vm.program.encoding import encode_program, families, first_weights
from tpcompile.vm.program.instruction import NONE, Probe
from tpcompile.vm.proof.verify import verify_program

_LOOK_MS = 100
"""The interval of checks for signals such as Ctrl-C during a launch."""
_ALL = 2**63 - 1
"""More steps than any launch has."""
_FAILED = -1
_ADDRESS = column_offsets()["address"]
_REPLACED = {*STORED_DIMS, Role.LOGITS}
"""The roles of buffers whose tensors may be replaced between launches."""
_TIMEOUT_S = 60.0
T = TypeVar("T")


class _Program(ctypes.Structure):
    """`tpc_program` of the library."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "buffers")),
        *((name, ctypes.c_void_p) for name in ("queue_offsets", "queue_values")),
        *((name, ctypes.c_void_p) for name in ("wait_offsets", "wait_values")),
        *((name, ctypes.c_void_p) for name in ("signal_offsets", "signal_values")),
        *((name, ctypes.c_void_p) for name in ("totals", "weights", "families")),
        *((name, ctypes.c_void_p) for name in ("counters", "board")),
        *((name, ctypes.c_int64) for name in ("counter_rows", "counter_stride", "own_row")),
        *((name, ctypes.c_int32) for name in ("buffer_count", "instruction_count")),
        *((name, ctypes.c_int32) for name in ("counter_count", "queue_value_count")),
        *((name, ctypes.c_int32) for name in ("wait_count", "signal_count")),
        *((name, ctypes.c_int32) for name in ("first_queue", "queues", "sharing")),
        *((name, ctypes.c_int32) for name in ("first_worker", "workers")),
        ("timeout", ctypes.c_double),
        ("delays", ctypes.c_uint64),
    )


@executor
class Native(Executor):
    """An executor that runs a program on threads, one per worker.

    The threads start with the executor and sleep between launches. `path` is the name of a vector
    path, by default the fastest of this CPU. `delays` is the seed of random delays before
    instructions, which expose races in tests; 0 disables them.

    The program is verified again here, because kernels rely on it: a wrong operand or queue would
    make them access other memory.
    """

    name: ClassVar[str] = "native"
    functions: ClassVar[str] = "tpcompile.backends.native"
    most_tokens: ClassVar[int] = 8
    takes_times: ClassVar[bool] = True
    in_formats: ClassVar[bool] = True
    kv_in_formats: ClassVar[bool] = True

    @classmethod
    def prepare(cls) -> None:
        """Build the library without kernels, unless it is in the cache."""
        library()

    @classmethod
    def check(cls, program: Program, device: torch.device = CPU) -> None:
        """Raise unless all instructions have kernels for the dtypes of their operands.

        The kernels of the program's dtype are built, unless they are in the cache.
        """
        super().check(program, device)
        check_kernels(program, _chosen(None))

    @classmethod
    def during(cls, wait: Callable[[], T]) -> T:
        """Call `wait` while torch's threads sleep, because they would compete with the workers."""
        return asleep(wait)

    def __init__(self, memory: StepMemory, path: str | None = None, delays: int = 0) -> None:
        super().__init__(memory)
        program = memory.program
        verify_program(program)
        self.path, self._delays = _chosen(path), delays
        self._table = memory.table()
        self._rows = self._table.numpy()
        check_table(self._table, memory)
        native_arrays = {"weights": self.first_weights, "families": families(program)}
        self._arrays = encode_program(program).arrays() | native_arrays
        self._replaced = [
            (number, buffer)
            for number, buffer in enumerate(program.buffers)
            if buffer.role in _REPLACED and buffer.rank in memory.ranks
        ]
        self._known: dict[int, torch.Tensor] = {}
        """The replaced tensors that the table describes, by buffer."""
        self._counters = torch.zeros(max(1, program.counters), dtype=torch.int64)
        self._board = torch.zeros(board_size(program), dtype=torch.uint8)
        own_kernels = kernels(self.path, dtype_of(program))
        opened = library().tpc_open(ctypes.byref(self._program()), own_kernels)
        if opened is None:
            self._raise_refusal()
            raise UnsupportedError(
                "The threads of the native backend cannot be started",
                got=f"{len(program.queues) * program.sharing} workers",
                hint="Allow more threads, or choose a target with fewer workers",
            )
        self._machine, self._owner = ctypes.c_void_p(opened), os.getpid()
        self._close = weakref.finalize(self, _close, self._machine, self._owner)
        self._close.atexit = False  # at exit a daemon thread may still be in a launch

    def launch(self, steps: int, *options: Any) -> int:
        """Run up to `steps` steps. `options` may be an int64 tensor `[instructions, 3]`.

        It receives the times in ns at which each instruction of the last step was taken, became
        ready and was done.
        """
        self._check_usable()
        times = options[0] if options else None
        check_times(times, self.memory.program)
        self._refresh()
        done = self._run(steps, ctypes.c_void_p(None if times is None else times.data_ptr()))
        if done == _FAILED:
            share = self.memory.share
            if share is not None:
                raise share.missed("a step of the native backend")
            raise RankError(
                f"An instruction waited {self._timeout:g} s for another one",
                hint="Compile the model again",
            )
        return done

    def execute(self, number: int, probe: Probe) -> None:
        """Run one instruction in this thread, without waits and signals."""
        self._check_usable()
        self._refresh()
        library().tpc_execute(self._machine, ctypes.c_int32(number))

    def hand_over_logits(self) -> torch.Tensor:
        return self.memory.hand_over_logits()

    def close(self) -> None:
        """End the threads and release the memory."""
        self._close()
        self._known.clear()
        super().close()

    def _run(self, steps: int, times: ctypes.c_void_p) -> int:
        """Run a launch to its end, and pass tokens on. After an error, wait for the current step.

        Python raises KeyboardInterrupt between two calls of the library, and not within one.
        """
        done: int
        share, end = self.memory.share, library().tpc_end
        try:
            library().tpc_launch(self._machine, ctypes.c_int64(steps), times)
            wanted = 1 if self.streams else _ALL
            while not self._ended(wanted):
                if share is not None and share.lost():
                    library().tpc_give_up(self._machine)
                if self.streams:
                    done = library().tpc_steps_done(self._machine)
                    self.tell(done)
                    wanted = done + 1
        finally:
            done = end(self._machine)  # the first call here, since a call may be interrupted
            if done == _FAILED:
                self._close()
        return done

    @property
    def first_weights(self) -> torch.Tensor:
        """The address of the weights that each instruction reads first, or 0."""
        buffers, first, _ = first_weights(self.memory.program).unbind(1)
        return torch.where(buffers == NONE, 0, self._table[buffers.clamp(min=0), 0] + first)

    def _raise_refusal(self) -> None:
        """Raise if the library has refused the program, whose words do not fit its buffers."""
        refusal = library().tpc_refusal().decode()
        if refusal:
            raise VerifyError(
                "The native library refuses the program",
                got=refusal,
                hint="Compile the model again",
            )

    def _check_usable(self) -> None:
        """Raise if the executor is closed or belongs to another process."""
        if not self._close.alive:
            raise UsageError("The executor is closed", hint="Compile the model again")
        if os.getpid() != self._owner:
            raise UsageError(
                f"The executor belongs to process {self._owner}; this is process {os.getpid()}, "
                "forked from it",
                hint="Compile the model again",
            )

    def _ended(self, wanted: int) -> bool:
        """Wait for the end of the launch or of `wanted` steps; return whether the launch ended."""
        milliseconds, steps = ctypes.c_int64(_LOOK_MS), ctypes.c_int64(wanted)
        ended: int = library().tpc_wait(self._machine, milliseconds, steps)
        return bool(ended)

    def _program(self) -> _Program:
        program, share = self.memory.program, self.memory.share
        queues_per_rank = len(program.queues) // program.ranks
        structure = _Program(
            **{name: array.data_ptr() for name, array in self._arrays.items()},
            buffers=self._table.data_ptr(),
            counters=self._counters.data_ptr(),
            board=self._board.data_ptr(),
            counter_rows=1,
            counter_stride=self._counters.numel(),
            own_row=0,
            buffer_count=len(self._table),
            instruction_count=len(self._arrays["words"]),
            counter_count=len(self._arrays["totals"]),
            **{f"{name}_count": len(self._arrays[f"{name}_values"]) for name in ("wait", "signal")},
            queue_value_count=len(self._arrays["queue_values"]),
            first_queue=0,
            queues=len(program.queues),
            sharing=program.sharing,
            first_worker=0,
            workers=len(program.queues) * program.sharing,
            timeout=self._timeout,
            delays=self._delays,
        )
        if share is not None:
            structure.counters, structure.board = share.counters.data_ptr(), share.board.data_ptr()
            structure.counter_rows, structure.counter_stride = share.counters.shape
            structure.own_row = share.rank
            structure.first_queue, structure.queues = share.rank * queues_per_rank, queues_per_rank
            structure.first_worker = share.rank * queues_per_rank * program.sharing
        return structure

    @property
    def _timeout(self) -> float:
        share = self.memory.share
        return _TIMEOUT_S if share is None else share.timeout

    def _refresh(self) -> None:
        """Write replaced tensors to the table; those of other roles must not change."""
        for number, buffer in self._replaced:
            tensor, known = self.memory.tensors[number], self._known.get(number)
            if tensor is known:
                continue
            if known is not None and tensor.shape == known.shape:
                self._rows[number, _ADDRESS] = tensor.data_ptr()
            else:
                self._rows[number] = buffer_row(buffer, tensor, self.memory.block)
            self._known[number] = tensor


def _close(machine: ctypes.c_void_p, owner: int) -> None:
    """End the threads of a machine. A fork has not inherited them, and must not wait for them."""
    if os.getpid() == owner:
        library().tpc_close(machine)


def _chosen(path: str | None) -> str:
    known = paths()
    if path is None:
        return known[0]
    if path not in known:
        raise UsageError(
            f"The vector path {path!r} is not available on this CPU", hint=did_you_mean(path, known)
        )
    return path
