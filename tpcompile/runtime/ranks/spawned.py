"""Ranks that a plain script starts, each as a worker process; the script itself is not a rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from tpcompile.backends.executor import OnTokens
from tpcompile.cores import cores, threads_of
from tpcompile.errors import CompileError, UnsupportedError, UsageError
from tpcompile.ir.pieces import Read
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.progress import LoadCounter, Loaded
from tpcompile.runtime.ranks.channel import encode
from tpcompile.runtime.ranks.descriptors import allocated_file
from tpcompile.runtime.ranks.later import Later
from tpcompile.runtime.ranks.owner import Owner, check_open
from tpcompile.runtime.ranks.parameters import Places
from tpcompile.runtime.ranks.protocols import OneFront
from tpcompile.runtime.ranks.rank import RankModule
from tpcompile.runtime.ranks.shared_sum import offered
from tpcompile.runtime.ranks.shared_weights import SharedWeights, fill
from tpcompile.runtime.ranks.step import ProgramSize, Step, StepCode
from tpcompile.runtime.ranks.worker import (
    Done,
    Fetch,
    FetchTimes,
    Load,
    LoadProgram,
    Ready,
    Run,
    RunProgram,
    Tables,
    Weights,
)
from tpcompile.runtime.ranks.workers import Workers
from tpcompile.runtime.weights import RandomWeights

_TOKENS_A_LIMIT = 256
"""The number of tokens that adds one timeout to a step's limit: long prompts take longer."""


class SpawnedRanks(OneFront):
    """All ranks of a model, as processes of this machine.

    The constructor starts them from one interpreter, which takes about two seconds to import torch;
    `load` waits for them. If a rank fails, dies, or is silent for `timeout` seconds, all ranks end.
    Torch has `threads` threads on each rank, by default an equal share of the cores.
    """

    def __init__(self, tp: int, *, threads: int | None = None, timeout: float = 60.0) -> None:
        self._owner = Owner()
        self._lock = threading.Lock()
        self._closed = ""
        self._modules: Sequence[RankModule] = ()
        self._rotary: nn.Module | None = None
        self._timeout = timeout
        self._workers = Workers(tp, threads_of(tp, threads), timeout)

    @property
    def processes(self) -> list[int]:
        """The process ids, by rank."""
        return self._workers.pids

    @property
    def closed(self) -> str:
        return self._owner.refusal or self._closed

    def load(
        self,
        modules: Sequence[RankModule],
        weights: CheckpointFiles | Read,
        rotary: Callable[[], nn.Module],
        loaded: Loaded = lambda done, total: None,
    ) -> None:
        """Load each worker's module; call `loaded` with the number of parameters and their total.

        Workers read checkpoints and seeds themselves. Any other source is read in this process, one
        parameter at a time, into memory that is then passed to the worker.
        """
        with self._working():
            port = next(ready.port for ready in self._workers.answers(Ready))
            counted = LoadCounter(loaded, sum(len(module.parameters) for module in modules))
            eager = cores() >= len(modules)
            with offered(len(modules)) as offer:
                library = None if offer is None else offer.library
                for module in modules:
                    load = partial(Load, module, len(modules), port, eager, library)
                    self._send_module(module, load, weights, counted.add)
                self._workers.introduce()
                if offer is not None:
                    for module in modules:
                        self._workers.send_file(module.rank, offer.memory)
            self._workers.answers(Done, lambda _: counted.add())
            self._modules, self._rotary = modules, rotary()

    def run(self, step: Step) -> torch.Tensor:
        """Run a step; return the result of rank 0."""
        return self._run(step, all_answer=False)[0]

    def run_all(self, step: Step) -> list[torch.Tensor]:
        return self._run(step, all_answer=True)

    def _run(self, step: Step, *, all_answer: bool) -> list[torch.Tensor]:
        check_open(self.closed)
        message = encode(Run(step, self._tables(step), all_answer))
        with self._working():
            for rank in range(len(self._modules)):
                self._workers.send(rank, message)
            patience = 1 + len(step.inputs.get("input_ids", ())) / _TOKENS_A_LIMIT
            answers = self._workers.answers(Done, patience=patience)
            results = [done.result for done in answers]
        return [result for result in results if result is not None]

    def load_program(self, code: StepCode) -> None:
        """Load a program on every rank, with memory that they share."""
        file = _allocated(code.memory)
        try:
            with self._working():
                message = encode(LoadProgram(code.encoded(), self._timeout))
                for rank in range(len(self._modules)):
                    self._workers.send(rank, message)
                    self._workers.send_file(rank, file)
                self._workers.answers(Done)
        finally:
            os.close(file)

    def run_program(
        self, size: ProgramSize, step: Step, on_tokens: OnTokens | None = None
    ) -> torch.Tensor:
        """Run steps by the program of this size; return the result of all ranks."""
        check_open(self.closed)
        message = encode(RunProgram(size, step, streams=on_tokens is not None))
        with Later(on_tokens) as later, self._working():
            for rank in range(len(self._modules)):
                self._workers.send(rank, message)
            answers = self._workers.answers(Done, later.receive, patience=step.steps)
        return torch.cat([done.result for done in answers if done.result is not None], 1)

    def times(self, size: ProgramSize) -> torch.Tensor:
        with self._working():
            for rank in range(len(self._modules)):
                self._workers.send(rank, encode(FetchTimes(size)))
            answers = self._workers.answers(Done)
        return torch.stack([done.result for done in answers if done.result is not None]).sum(0)

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        with self._working():
            self._workers.send(rank, encode(Fetch(name)))
            (answer,) = self._workers.answers(Done, ranks=[rank])
        assert answer.result is not None
        return answer.result

    def close(self) -> None:
        """End the workers. A fork of their owner only closes its copies of their files."""
        if not self._owner.here:  # a fork, in which the lock may never be released
            self._shut("The model is closed")
            return
        with self._lock:
            self._shut("The model is closed")

    def _tables(self, step: Step) -> Tables:
        if self._rotary is None:
            raise UsageError("The ranks are not loaded", hint="Call load() first")
        kinds = dict.fromkeys(kind for module in self._modules for kind in module.rotary)
        with torch.inference_mode():
            return {kind: self._rotary(step.inputs["positions"], *kind) for kind in kinds}

    def _send_module(
        self,
        module: RankModule,
        load: Callable[[Weights], Load],
        weights: CheckpointFiles | Read,
        loaded: Callable[[], None],
    ) -> None:
        if isinstance(weights, CheckpointFiles | RandomWeights):
            self._workers.send(module.rank, encode(load(weights)))
            return

        def filled() -> None:
            self._workers.check_alive()
            loaded()

        places = Places.of(module)
        file = fill(module, places, weights, filled)
        try:
            self._workers.send(module.rank, encode(load(SharedWeights(places))))
            self._workers.send_file(module.rank, file)
        finally:
            os.close(file)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Admit one caller at a time; any error ends the workers, because they are out of step."""
        self._owner.check()  # a fork of the owner may have inherited a held lock
        with self._lock:
            check_open(self._closed)
            try:
                yield
            except CompileError as error:
                self._shut(f"The model is closed: {error.message[:1].lower()}{error.message[1:]}")
                raise
            except BaseException as error:
                self._shut(f"The model is closed: a call raised {type(error).__name__}")
                raise

    def _shut(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._workers.end()


def _allocated(size: int) -> int:
    try:
        return allocated_file("tpcompile-step", size)
    except OSError as error:
        raise UnsupportedError(
            "The memory that ranks share cannot be allocated",
            got=f"{size:,} bytes: {error.strerror}",
            hint='Free some memory, or compile with backend="torch"',
        ) from error
