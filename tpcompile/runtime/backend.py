"""The choice of the backend that runs decode steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from tpcompile.backends.devices import FASTEST
from tpcompile.backends.executor import EXECUTORS, Executor
from tpcompile.backends.triton.executor import Triton
from tpcompile.errors import CompileError, UnsupportedError, UsageError, did_you_mean
from tpcompile.passes.cache_kv import CacheKv
from tpcompile.passes.pipeline import DecodeFork
from tpcompile.runtime.programs import ProgramOptions, StepPrograms
from tpcompile.runtime.ranks.program import ProgramRanks
from tpcompile.runtime.ranks.protocols import ModuleRanks, Ranks
from tpcompile.runtime.ranks.step import size_for

AUTO = "auto"
MODULES = "torch"
"""The backend without programs. All other backends are executors of programs."""
_INTERPRETED = (
    "Triton's interpreter runs the kernel, which is thousands of times slower than a GPU. "
    'On a CPU, choose backend="native".'
)


class BackendChoice:
    """A backend by name. "auto" prefers an executor, and falls back to modules."""

    def __init__(self, backend: str, device: torch.device, options: ProgramOptions) -> None:
        """Check the name against the device and the options of programs."""
        _check_name(backend)
        automatic = backend == AUTO
        if automatic:
            known = FASTEST.get(device.type)
            backend = MODULES if known is None else known.name
        if backend == MODULES and options != ProgramOptions():
            raise UsageError(
                "Modules have no target, policy, lowering or spans",
                hint=f'Compile with backend="{FASTEST[device.type].name}"',
            )
        if backend != MODULES and device.type not in EXECUTORS[backend].devices:
            raise UnsupportedError(
                f"The {backend} backend does not run on {device}",
                expected=" or ".join(EXECUTORS[backend].devices),
                hint='Choose backend="auto"',
            )
        self.name = backend
        """The name of an executor, or "torch" for modules."""
        self.device, self._options = device, options
        self._falls_back = automatic and options == ProgramOptions()

    def decide(
        self, fork: DecodeFork, longest: int, batch: int, workers: int | None = None
    ) -> StepBackend:
        """Return the executor and the programs that it runs, or modules if they run decode steps.

        See `StepPrograms` for the arguments. If the choice is automatic, warn about the reason why
        there are no programs.
        """
        cached = any(isinstance(current, CacheKv) for current in fork.passes)
        if self.name == MODULES or (self._falls_back and not cached):  # nothing can decode
            return StepBackend(self)
        executor = EXECUTORS[self.name]
        if self.name == Triton.name and self.device.type == "cpu":
            warnings.warn(_INTERPRETED, stacklevel=5)
        with self.or_modules():
            executor.prepare()
            rows = size_for(batch, executor.size_parts)
            programs = StepPrograms(fork, self._options, longest, rows, self.device, workers)
            executor.check(programs.for_batch(programs.batch).program, self.device)
            return StepBackend(self, executor, programs)
        return StepBackend(self)

    @contextmanager
    def or_modules(self) -> Iterator[None]:
        """If the body raises and the choice is automatic, warn that modules run decode steps."""
        try:
            yield
        except CompileError as error:
            if not self._falls_back:
                raise
            warnings.warn(
                "Torch modules run decode steps, because the "
                f"{FASTEST[self.device.type].name} backend cannot. The reason: {error}\n"
                'Pass backend="torch" to choose modules without this warning.',
                stacklevel=7,
            )


@dataclass(frozen=True)
class StepBackend:
    """The executor of decode steps and its programs; both are None if modules run the steps."""

    choice: BackendChoice
    executor: type[Executor] | None = None
    programs: StepPrograms | None = None

    def ranks(self, modules: ModuleRanks, rotary: Callable[[], nn.Module]) -> Ranks:
        """Return ranks that run the programs, or the modules alone if there are no programs.

        If the choice is automatic, ranks that share no memory run the modules, with a warning.
        """
        if self.executor is None or self.programs is None:
            return modules
        name, device = self.choice.name, self.choice.device
        with self.choice.or_modules():
            if len(set(modules.processes)) > 1 and not self.executor.in_processes:
                raise UnsupportedError(
                    f"The {name} backend runs all ranks in one process",
                    got=f"{len(set(modules.processes))} processes",
                    hint='Choose backend="native", or pass simulate=True to tpcompile.compile',
                )
            modules.check_programs()
            return ProgramRanks(modules, self.programs, rotary, name, device)
        return modules


def _check_name(backend: str) -> None:
    known = (AUTO, MODULES, *EXECUTORS)
    if backend not in known:
        raise UsageError(f"There is no backend {backend!r}", hint=did_you_mean(str(backend), known))
