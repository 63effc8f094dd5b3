"""The choice of the backend that runs decode steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tpcompile.backends.devices import AUTOMATIC, FASTEST
from tpcompile.backends.executor import EXECUTORS, Executor
from tpcompile.errors import CompileError, UnsupportedError, UsageError, did_you_mean
from tpcompile.passes.cache_kv import CacheKv
from tpcompile.passes.pipeline import DecodeFork
from tpcompile.runtime.programs import ProgramOptions, StepPrograms
from tpcompile.runtime.ranks.program import ProgramRanks
from tpcompile.runtime.ranks.rank import ModuleRanks, Ranks

AUTO = "auto"
MODULES = "torch"
"""The backend without programs. All other backends are executors of programs."""


class BackendChoice:
    """A backend by name. "auto" prefers an executor, and falls back to modules."""

    def __init__(self, backend: str, device: torch.device, options: ProgramOptions) -> None:
        """Check the name against the device and the options of programs."""
        _check_name(backend)
        automatic = backend == AUTO
        if automatic:
            known = AUTOMATIC.get(device.type)
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
        self._options, self._device = options, device
        self._falls_back = automatic and options == ProgramOptions()

    @property
    def executor(self) -> type[Executor] | None:
        """The executor; None if modules run decode steps."""
        return None if self.name == MODULES else EXECUTORS[self.name]

    def programs(
        self, fork: DecodeFork, longest: int, batch: int, workers: int | None = None
    ) -> StepPrograms | None:
        """Return the programs that the executor runs, or None if modules run decode steps.

        See `StepPrograms` for the arguments. If the choice is automatic, warn about the reason why
        there are no programs.
        """
        cached = any(isinstance(one, CacheKv) for one in fork.passes)
        if self._falls_back and not cached:  # nothing can decode
            self.name = MODULES
        if self.name == MODULES:
            return None
        executor = EXECUTORS[self.name]
        with self._or_modules():
            executor.prepare()
            found = StepPrograms(fork, self._options, longest, batch, self._device, workers)
            executor.check(found.for_batch(found.batch).program, self._device)
            return found
        return None

    def ranks(
        self,
        modules: ModuleRanks,
        programs: StepPrograms | None,
        rotary: Callable[[], nn.Module],
    ) -> Ranks:
        """Return ranks that run the programs, or the modules alone if there are no programs."""
        if programs is None:
            return modules
        with self._or_modules():
            if len(set(modules.processes)) > 1 and not EXECUTORS[self.name].in_processes:
                raise UnsupportedError(
                    f"The {self.name} backend runs all ranks in one process",
                    got=f"{len(set(modules.processes))} processes",
                    hint='Choose backend="native", or pass simulate=True to tpcompile.compile',
                )
            modules.check_programs()
            return ProgramRanks(modules, programs, rotary, self.name, self._device)
        return modules

    @contextmanager
    def _or_modules(self) -> Iterator[None]:
        """If the body raises and the choice is automatic, choose modules and warn."""
        try:
            yield
        except CompileError as error:
            if not self._falls_back:
                raise
            self.name = MODULES
            warnings.warn(
                "Torch modules run decode steps, because the "
                f"{AUTOMATIC[self._device.type].name} backend cannot. The reason: {error}\n"
                'Pass backend="torch" to choose modules without this warning.',
                stacklevel=6,
            )


def _check_name(backend: str) -> None:
    known = (AUTO, MODULES, *EXECUTORS)
    if backend not in known:
        raise UsageError(f"There is no backend {backend!r}", hint=did_you_mean(str(backend), known))
