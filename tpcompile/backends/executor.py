"""Executors, which run the decode steps of programs, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from tpcompile.backends.memory import StepMemory
from tpcompile.backends.rotation import CPU
from tpcompile.errors import UnsupportedError
from tpcompile.ir.format import FLOATS
from tpcompile.registry import Registry
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.abi import VERSION, check_version
from tpcompile.vm.program.instruction import Probe, StepInstruction

EXECUTORS: Registry[type[Executor]] = Registry("executor")
TORCH = "tpcompile.backends.torch_tp"
"""The package whose functions emitted modules call unless an executor brings its own."""
_Kind = TypeVar("_Kind", bound="type[Executor]")
T = TypeVar("T")
OnTokens = Callable[[torch.Tensor], None]
"""Callback that receives the tokens of one step, `[batch]`."""
ProbeOf = Callable[[StepInstruction], Probe]
"""A function from an instruction to the probe that receives its values."""


def executor(kind: _Kind) -> _Kind:
    """Register an executor class; its `name` becomes the name of a backend."""
    EXECUTORS.add(kind.name, kind)
    return kind


_HELD = {Role.WEIGHT: "weights", Role.CACHE: "a KV cache"}


def refuse_formats(program: Program, role: Role, backend: str) -> None:
    """Raise if weights or the KV cache are in a format, for a backend without formats."""
    held = (
        buffer for buffer in program.buffers if buffer.role == role and buffer.format is not None
    )
    first = next(held, None)
    if first is not None:
        raise UnsupportedError(
            f"The {backend} backend cannot read {_HELD[role]} in {first.format}",
            where=first.name,
            expected=f"{_HELD[role]} in " + ", ".join(map(str, FLOATS)),
            hint='Compile with backend="torch"',
        )


class Executor(ABC):
    """An interpreter or a compiled kernel that runs one program in its memory.

    A subclass implements `launch`, and `execute` if its values can be compared one by one. The
    input checks and the results are common to all executors.
    """

    name: ClassVar[str]
    abi: ClassVar[int] = VERSION
    """The version of the binary interface that the executor implements."""
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    """The types of devices that it runs on."""
    in_processes: ClassVar[bool] = True
    """Whether each rank may run in a process of its own; if not, one process runs all ranks."""
    in_formats: ClassVar[bool] = False
    """Whether it reads weights of several components."""
    kv_in_formats: ClassVar[bool] = False
    """Whether it reads and writes a KV cache whose rows have several components."""
    same_for_ranks: ClassVar[bool] = True
    """Whether results have the same bits for every number of ranks that splits the sizes evenly."""
    functions: ClassVar[str] = TORCH
    """The package whose `functions` modules call beside programs of this executor."""
    most_tokens: ClassVar[int] = 1
    """The maximum number of new tokens of a sequence that its programs compute, as rows. Modules
    compute more, except guesses. It is fixed, so that bits do not depend on timing."""
    size_parts: ClassVar[int] = 8
    """The rows of its programs are multiples of this part of the next power of two: 1, …, 8, 10, 12
    and so on for 8. More parts leave fewer rows empty, and make more programs."""
    takes_times: ClassVar[bool] = False
    """Whether the option of `launch` is a tensor that receives the times of instructions."""

    @classmethod
    def prepare(cls) -> None:
        """Do what is needed once per machine, such as building a library. Raise if it fails."""
        return

    @classmethod
    def check(cls, program: Program, device: torch.device = CPU) -> None:
        """Raise if the executor cannot run this program there, e.g. if a kernel is missing."""
        check_version(cls.abi, cls.name)
        if device.type not in cls.devices:
            raise UnsupportedError(
                f"The {cls.name} backend does not run on {device}",
                expected=" or ".join(cls.devices),
            )
        if not cls.in_formats:
            refuse_formats(program, Role.WEIGHT, cls.name)
        if not cls.kv_in_formats:
            refuse_formats(program, Role.CACHE, cls.name)

    @classmethod
    def during(cls, wait: Callable[[], T]) -> T:
        """Call `wait`, which waits for a launch in this process or in others; return its result."""
        return wait()

    def __init__(self, memory: StepMemory) -> None:
        self.check(memory.program, memory.device)
        self.memory = memory
        self._on_tokens: OnTokens | None = None
        self._reported = 0

    def place(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tables: torch.Tensor,
        positions: torch.Tensor | None = None,
        stops: Sequence[int] = (),
        ended: torch.Tensor | None = None,
        read: torch.Tensor | None = None,
        write: torch.Tensor | None = None,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Write the inputs of the next step: see `StepMemory.place`."""
        self.memory.place(tokens, lengths, tables, positions, stops, ended, read, write, starts)

    def run(self, steps: int = 1, *options: Any, on_tokens: OnTokens | None = None) -> torch.Tensor:
        """Run steps as `advance` does; return their tokens, `[steps, batch]`.

        A sequence that has already ended gets -1.
        """
        return self.memory.tokens(self.advance(steps, *options, on_tokens=on_tokens))

    def advance(self, steps: int, *options: Any, on_tokens: OnTokens | None = None) -> int:
        """Run `steps` steps, fewer if all sequences end, and return their number.

        `options` are passed to `launch`. `on_tokens` receives the tokens of each step as soon as
        they are known.
        """
        self.memory.begin(steps)
        self.memory.upload()
        self._on_tokens, self._reported = on_tokens, 0
        try:
            done = self.launch(steps, *options)
            self.memory.download()
            self.tell(done)
        finally:
            self._on_tokens = None
        return done

    @abstractmethod
    def launch(self, steps: int, *options: Any) -> int:
        """Run up to `steps` steps and return their number. An executor may have options.

        It may call `tell` during the launch.
        """

    def execute(self, number: int, probe: Probe) -> None:
        """Run one instruction. The probe may receive values that it computes and does not store."""
        raise UnsupportedError(
            f"The {self.name} backend cannot run instructions one by one",
            hint='Compare with the "reference" backend',
        )

    def observe(self, turns: Iterable[int], probe_of: ProbeOf) -> torch.Tensor:
        """Run the instructions of a step one by one, report all values, and return the tokens."""
        self.memory.begin(1)
        self.memory.forget()
        self.memory.upload()
        with torch.inference_mode():
            for number in turns:
                instruction: Any = self.memory.program.instructions[number]
                probe = probe_of(instruction)
                self.execute(number, probe)
                instruction.report(self.memory.tensors, probe)
        self.memory.download()
        return self.memory.tokens(1)[0]

    @property
    def streams(self) -> bool:
        """Whether the caller of `run` receives tokens while the launch runs."""
        return self._on_tokens is not None

    def tell(self, done: int) -> None:
        """Report the new tokens among those of the first `done` steps of the launch."""
        while self._on_tokens is not None and self._reported < done:
            self._reported += 1
            self._on_tokens(self.memory.tokens(self._reported)[-1])

    @property
    def logits(self) -> torch.Tensor:
        """The logits of the last step, `[batch, vocabulary]`."""
        return self.memory.logits

    def hand_over_logits(self) -> torch.Tensor:
        """Return the logits of the last step as a tensor that later steps do not write."""
        return self.logits

    def close(self) -> None:
        """Release the memory. No step can be run afterwards."""
        self.memory.tensors.clear()
