"""A worker: the process of one rank, which does what its parent asks over a channel."""

from __future__ import annotations

import datetime
import mmap
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from tpcompile.comm import Neighbours, PeerError, ProcessGroupRank
from tpcompile.errors import CompileError, RankError, UsageError
from tpcompile.ir.pieces import Read
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.memory import returned_at_once
from tpcompile.runtime.ranks.channel import Channel, ChannelClosed
from tpcompile.runtime.ranks.rank import Rank, RankModule, Step, make_parameter
from tpcompile.runtime.ranks.shared_weights import SharedWeights
from tpcompile.runtime.weights import RandomWeights

HOST = "127.0.0.1"
"""The ranks of a script are on one machine, and nobody else may talk to them."""

_CPU = torch.device("cpu")


Weights = CheckpointFiles | RandomWeights | SharedWeights
"""What a worker makes its parameters of."""
Tables = Mapping[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""Cosines and sines of a step, by width and dtype."""


@dataclass(frozen=True)
class Ready:
    """The interpreter runs; on rank 0, with the port where the ranks find each other."""

    port: int


@dataclass(frozen=True)
class Load:
    """Become this rank. Handed over behind it: the file of shared weights, if there is one, and
    a socket to each of the other ranks."""

    module: RankModule
    ranks: int
    port: int
    eager: bool
    """Whether there is a core for each rank, so that one may look for others without a rest."""
    weights: Weights

    def answer(self, worker: Worker) -> None:
        worker.load(self)


@dataclass(frozen=True)
class Run:
    """Run a step; rank 0 answers with the result, or every rank with its own."""

    step: Step
    tables: Tables
    all_answer: bool

    def answer(self, worker: Worker) -> torch.Tensor | None:
        return worker.run(self)


@dataclass(frozen=True)
class Fetch:
    """Answer with a parameter."""

    name: str

    def answer(self, worker: Worker) -> torch.Tensor:
        return worker.loaded().parameter(self.name)


@dataclass(frozen=True)
class Progress:
    """One more parameter is there."""


@dataclass(frozen=True)
class Done:
    """What was asked is done."""

    result: torch.Tensor | None


@dataclass(frozen=True)
class Failed:
    """What was asked failed; `lost_peer` if only because another rank did."""

    error: CompileError
    lost_peer: bool


class SentTables(nn.Module):
    """Hands out the rotary tables that came with the step."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: Tables = {}

    def forward(
        self, positions: torch.Tensor, width: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tables[width, dtype]


class Worker:
    """What a worker's process holds."""

    def __init__(self, rank: int, channel: Channel, store: TCPStore | None) -> None:
        self.rank = rank
        self._channel = channel
        self._store = store
        self._tables = SentTables()
        self._loaded: Rank | None = None

    def load(self, load: Load) -> None:
        with returned_at_once():
            self._load(load)

    def _load(self, load: Load) -> None:
        module = load.module
        weights = self._weights(module, load.weights)
        store = self._store or TCPStore(HOST, load.port)
        others = [socket.socket(fileno=self._channel.receive_file()) for _ in range(load.ranks - 1)]
        neighbours = Neighbours(module.rank, others, eager=load.eager)
        group = ProcessGroupRank(_connect(store, module.rank, load.ranks), neighbours)
        self._loaded = Rank(module, weights, self._tables, group, _CPU)

    def run(self, run: Run) -> torch.Tensor | None:
        self._tables.tables = run.tables
        result = self.loaded().run(run.step)
        return result if self.rank == 0 or run.all_answer else None

    def loaded(self) -> Rank:
        if self._loaded is None:
            raise UsageError("The ranks are not loaded", hint="Call load() first")
        return self._loaded

    def _weights(self, module: RankModule, source: Weights) -> dict[str, torch.Tensor]:
        if isinstance(source, SharedWeights):
            file = self._channel.receive_file()
            try:
                return source.attach(mmap.mmap(file, source.size), module)
            finally:
                os.close(file)
        if isinstance(source, CheckpointFiles):
            with source.open() as read:
                return evaluate_all(module, read, self._progress, _CPU)
        return evaluate_all(module, source, self._progress, _CPU)

    def _progress(self) -> None:
        self._channel.send(Progress())


def evaluate_all(
    module: RankModule, read: Read, loaded: Callable[[], None], device: torch.device
) -> dict[str, torch.Tensor]:
    """The parameters of one rank."""
    found = {}
    for name in module.parameters:
        found[name] = make_parameter(module, name, read, device)
        loaded()
    return found


def serve(rank: int, connection: int, threads: int) -> None:
    """Answer what comes through the connection, until the parent closes it."""
    torch.set_num_threads(threads)
    channel = Channel(socket.socket(fileno=connection))
    store = _make_store() if rank == 0 else None
    worker = Worker(rank, channel, store)
    try:
        channel.send(Ready(store.port if store else 0))
        while True:
            asked = channel.receive()
            try:
                answer: Done | Failed = Done(asked.answer(worker))
            except Exception as error:  # told to the parent, which ends all ranks
                answer = failure(rank, error)
            channel.send(answer)
    except ChannelClosed:
        return


def failure(rank: int, error: Exception) -> Failed:
    """An error as the parent is told it: a kind of `CompileError` stays what it is."""
    if isinstance(error, CompileError):
        where = f"rank {rank}" + (f", {error.where}" if error.where else "")
        return Failed(error.at(where), isinstance(error, PeerError))
    trace = "".join(traceback.format_exception(error))
    named = "".join(traceback.format_exception_only(error)).strip()
    told = RankError(f"Rank {rank} raised {named}", got=f"in the worker:\n{trace}")
    return Failed(told, False)


def _make_store() -> TCPStore:
    """Where the ranks leave their addresses for each other, on a port that is free."""
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    file = listening.detach()
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=file)


def _connect(store: Store, rank: int, ranks: int) -> Any:
    """The group sets no limit of its own: the parent watches, and knows more."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST)]
    options._timeout = datetime.timedelta(days=1)
    return gloo(store, rank, ranks, options)
