"""A worker: the process of one rank, which executes its parent's requests from a channel."""

from __future__ import annotations

import datetime
import mmap
import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from tpcompile.backends.share import RankShare
from tpcompile.comm import Neighbours, PeerError, ProcessGroupRank, SharedExchange
from tpcompile.errors import CompileError, RankError, UsageError
from tpcompile.plugins import load_plugins
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.memory import returned_at_once
from tpcompile.runtime.ranks.channel import Channel, ChannelClosed
from tpcompile.runtime.ranks.parameters import evaluate_all
from tpcompile.runtime.ranks.rank import Rank, RankModule
from tpcompile.runtime.ranks.shared_sum import attached
from tpcompile.runtime.ranks.shared_weights import SharedWeights
from tpcompile.runtime.ranks.step import EncodedCode, ProgramSize, Step
from tpcompile.runtime.weights import RandomWeights, opened

HOST = "127.0.0.1"
"""The ranks of a script are on one machine, and must not be reachable from others."""

_CPU = torch.device("cpu")


Weights = CheckpointFiles | RandomWeights | SharedWeights
"""The sources of a worker's parameters."""
Tables = Mapping[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""The cosines and sines of a step, by width and dtype."""


@dataclass(frozen=True)
class Ready:
    """The report that a worker has started; rank 0 adds the port of the store."""

    port: int


@dataclass(frozen=True)
class Load:
    """The request to load this rank.

    After it come the file of shared weights, if there is one, a socket to each other rank, and
    with a library the file of the memory for sums.
    """

    module: RankModule
    ranks: int
    port: int
    eager: bool
    """Whether each rank has a core, so that ranks may poll for each other."""
    library: Path | None
    """The file of the library for sums in shared memory; None to exchange over sockets."""
    weights: Weights

    def answer(self, worker: Worker) -> None:
        """Load the rank."""
        worker.load(self)


@dataclass(frozen=True)
class Run:
    """The request to run a step; rank 0 answers with the result, or every rank with its own."""

    step: Step
    tables: Tables
    all_answer: bool

    def answer(self, worker: Worker) -> torch.Tensor | None:
        """Run the step; return this rank's result if it is requested."""
        return worker.run(self)


@dataclass(frozen=True)
class LoadProgram:
    """The request to load a program; after it comes the file of the memory that ranks share."""

    code: EncodedCode
    timeout: float

    def answer(self, worker: Worker) -> None:
        """Load the program."""
        worker.load_program(self)


@dataclass(frozen=True)
class RunProgram:
    """The request to run a step by a program; every rank answers with its columns of the logits.

    All ranks have the same tokens, so only rank 0 answers with them.
    """

    size: ProgramSize
    step: Step
    streams: bool
    """Whether rank 0 reports the tokens of each step during the launch."""

    def answer(self, worker: Worker) -> torch.Tensor | None:
        """Run the step; return this rank's part of the result."""
        on_tokens = worker.progress if self.streams and worker.rank == 0 else None
        result = worker.loaded().run_program(self.size, self.step, on_tokens)
        return result if worker.rank == 0 or self.step.output == "logits" else None


@dataclass(frozen=True)
class FetchTimes:
    """The request for the times of the last timed step of a program."""

    size: ProgramSize

    def answer(self, worker: Worker) -> torch.Tensor:
        """Return the times; those of other ranks are 0."""
        return worker.loaded().times(self.size)


@dataclass(frozen=True)
class Fetch:
    """The request for a parameter."""

    name: str

    def answer(self, worker: Worker) -> torch.Tensor:
        """Return the parameter."""
        return worker.loaded().parameter(self.name)


@dataclass(frozen=True)
class Progress:
    """The report that one more parameter is loaded, or that a step of a program is done."""

    tokens: torch.Tensor | None = None
    """The tokens of the step."""


@dataclass(frozen=True)
class Done:
    """The answer to a request that succeeded."""

    result: torch.Tensor | None


@dataclass(frozen=True)
class Failed:
    """The answer to a request that failed; `lost_peer` if only because another rank failed."""

    error: CompileError
    lost_peer: bool


class SentTables(nn.Module):
    """A rotary module that returns the tables sent with the step."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: Tables = {}

    def forward(
        self, positions: torch.Tensor, width: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tables[width, dtype]


class Worker:
    """The state of a worker's process."""

    def __init__(self, rank: int, channel: Channel, store: TCPStore | None) -> None:
        self.rank = rank
        self._channel = channel
        self._store = store
        self._tables = SentTables()
        self._loaded: Rank | None = None

    def load(self, load: Load) -> None:
        """Load the weights and connect to the other ranks."""
        with returned_at_once():
            weights = self._weights(load.module, load.weights)
            store = self._store or TCPStore(HOST, load.port)
            files = [self._channel.receive_file() for _ in range(load.ranks - 1)]
            near = self._near(load, [socket.socket(fileno=file) for file in files])
            group = ProcessGroupRank(_connect(store, self.rank, load.ranks), near)
            self._loaded = Rank(load.module, weights, self._tables, group, _CPU)

    def _near(self, load: Load, peers: Sequence[socket.socket]) -> Neighbours | SharedExchange:
        if load.library is None:
            return Neighbours(self.rank, peers, load.eager)
        file = self._channel.receive_file()
        try:
            return attached(load.library, file, self.rank, peers, load.eager)
        finally:
            os.close(file)

    def run(self, run: Run) -> torch.Tensor | None:
        """Run a step; return this rank's result if it is requested."""
        self._tables.tables = run.tables
        result = self.loaded().run(run.step)
        return result if self.rank == 0 or run.all_answer else None

    def load_program(self, load: LoadProgram) -> None:
        """Decode a program, and attach to the memory that ranks share."""
        code = load.code.decoded()
        file = self._channel.receive_file()
        try:
            share = RankShare(code.program, self.rank, mmap.mmap(file, 0), load.timeout)
        finally:
            os.close(file)
        self.loaded().load_program(code, share)

    def loaded(self) -> Rank:
        """Return the rank, or raise if it is not loaded."""
        if self._loaded is None:
            raise UsageError("The ranks are not loaded", hint="Call load() first")
        return self._loaded

    def _weights(self, module: RankModule, source: Weights) -> dict[str, torch.Tensor]:
        if isinstance(source, SharedWeights):
            file = self._channel.receive_file()
            try:
                return source.copied(file, module)
            finally:
                os.close(file)
        with opened(source) as read:
            return evaluate_all(module, read, self.progress, _CPU)

    def progress(self, tokens: torch.Tensor | None = None) -> None:
        """Report progress to the parent."""
        self._channel.send(Progress(tokens))


def serve(rank: int, connection: int, threads: int) -> None:
    """Answer the requests from the connection until the parent closes it."""
    torch.set_num_threads(threads)
    load_plugins()  # registers their ops and instructions
    channel = Channel(socket.socket(fileno=connection))
    store = _make_store() if rank == 0 else None
    worker = Worker(rank, channel, store)
    try:
        channel.send(Ready(store.port if store else 0))
        while True:
            request = channel.receive()
            try:
                answer: Done | Failed = Done(request.answer(worker))
            except Exception as error:  # sent to the parent, which ends all ranks
                answer = failure(rank, error)
            channel.send(answer)
    except ChannelClosed:
        return


def failure(rank: int, error: Exception) -> Failed:
    """Return the answer for an error; subclasses of `CompileError` keep their type."""
    if isinstance(error, CompileError):
        where = f"rank {rank}" + (f", {error.where}" if error.where else "")
        return Failed(error.at(where), isinstance(error, PeerError))
    trace = "".join(traceback.format_exception(error))
    named = "".join(traceback.format_exception_only(error)).strip()
    rank_error = RankError(
        f"Rank {rank} raised {named}", got=f"this traceback in the worker:\n{trace}"
    )
    return Failed(rank_error, False)


def _make_store() -> TCPStore:
    """Create the store in which the ranks exchange their addresses, on a free port."""
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    file = listening.detach()
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=file)


def _connect(store: Store, rank: int, ranks: int) -> Any:
    """Connect the ranks, in effect without a timeout: the parent detects dead and hung ranks."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST)]
    options._timeout = datetime.timedelta(days=1)
    return gloo(store, rank, ranks, options)
