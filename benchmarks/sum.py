"""`python -m benchmarks sum`: time of a sum over ranks with gloo, sockets and shared memory.

Each rank is a process with one thread. The sides run in turn, some sums each, so that a slow moment
of the machine affects all of them. Every sum returns a new tensor. Sockets carry sums of up to 64
KB; larger ones take gloo's way.
"""

from __future__ import annotations

import argparse
import datetime
import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.counts import positive
from benchmarks.report import write_json
from tpcompile.comm import LIBRARY, Neighbours, ProcessGroupRank, SharedExchange, exchange_bytes
from tpcompile.cores import cores
from tpcompile.runtime.ranks.descriptors import allocated_file

GLOO, SOCKETS, SHARED = "gloo", "sockets", "shared memory"
SIDES = (GLOO, SOCKETS, SHARED)
HOST = "127.0.0.1"
LIMIT_S = 300.0
WARM_UP = 5
BYTES_A_TURN = 4 * 1024 * 1024
MOST_A_TURN, LEAST_A_TURN = 100, 10


@dataclass(frozen=True)
class Target:
    """The required speed of shared memory relative to a peer, for two ranks."""

    peer: str
    size: int
    least: float


TARGETS = (
    Target(GLOO, 4096, 20.0),
    Target(SOCKETS, 4096, 1.0),
    Target(GLOO, 1 << 20, 1.0),
)


@dataclass
class Measured:
    """Seconds of each sum on rank 0, by size in bytes and side."""

    ranks: int
    seconds: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    same_bits: bool = True

    def ratio(self, target: Target) -> float:
        shared, peer = (self.seconds[target.size][side] for side in (SHARED, target.peer))
        return median(peer) / median(shared)

    def targets(self) -> list[tuple[Target, float]]:
        """Return the targets of the measured sizes, each with the ratio reached."""
        if self.ranks != 2:
            return []
        return [(target, self.ratio(target)) for target in TARGETS if target.size in self.seconds]

    @property
    def ok(self) -> bool:
        return self.same_bits and all(ratio >= t.least for t, ratio in self.targets())


@dataclass(frozen=True)
class Plan:
    """What every rank runs."""

    ranks: int
    port: int
    sizes: tuple[int, ...]
    turns: int


def measure(ranks: int, sizes: Sequence[int], turns: int) -> Measured:
    """Start the ranks, and return the times of rank 0."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    plan = Plan(ranks, store.port, tuple(sizes), turns)
    sockets: list[list[socket.socket]] = [[] for _ in range(ranks)]
    for pair in combinations(range(ranks), 2):
        for rank, end in zip(pair, socket.socketpair(), strict=True):
            sockets[rank].append(end)
    memory = allocated_file("tpcompile-benchmark", exchange_bytes(ranks))
    LIBRARY.built()
    receiver, sender = context.Pipe(duplex=False)
    processes = []
    for rank in range(ranks):
        arguments = (plan, rank, sockets[rank], _File(memory), sender)
        processes.append(context.Process(target=_run_rank, args=arguments, daemon=True))
    try:
        for process in processes:
            process.start()
        sender.close()  # so that the ranks' end shows on this one
        for end in chain.from_iterable(sockets):
            end.close()
        if not receiver.poll(LIMIT_S):
            raise TimeoutError(f"the ranks did not finish within {LIMIT_S:g} s")
        measured: Measured = receiver.recv()
        return measured
    finally:
        os.close(memory)
        for process in processes:
            if process.pid is not None:
                process.join(5)
                process.kill()


class _File:
    """An open file that a process is given when it starts."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (DupFd(self.number),)


def _opened(file: Any) -> _File:
    return _File(file.detach())


def _run_rank(
    plan: Plan, rank: int, sockets: list[socket.socket], memory: _File, report: Connection
) -> None:
    torch.set_num_threads(1)
    store = TCPStore(HOST, plan.port)
    group: Any = dist.ProcessGroupGloo
    limit = datetime.timedelta(seconds=LIMIT_S)
    group = group(store, rank, plan.ranks, limit)
    eager = cores() >= plan.ranks
    shared = SharedExchange(
        LIBRARY.load(),
        mmap.mmap(memory.number, exchange_bytes(plan.ranks)),
        rank,
        plan.ranks,
        eager=eager,
        peers=[],
        timeout=LIMIT_S,
    )
    sides = {
        GLOO: ProcessGroupRank(group),
        SOCKETS: ProcessGroupRank(group, Neighbours(rank, sockets, eager)),
        SHARED: ProcessGroupRank(group, shared),
    }
    measured = Measured(plan.ranks)
    with torch.inference_mode():
        for size in plan.sizes:
            _measure_size(measured, sides, size, rank, plan.turns)
    if rank == 0:
        report.send(measured)


def _measure_size(
    measured: Measured, sides: dict[str, ProcessGroupRank], size: int, rank: int, turns: int
) -> None:
    seconds = measured.seconds.setdefault(size, {side: [] for side in sides})
    times = min(MOST_A_TURN, max(LEAST_A_TURN, BYTES_A_TURN // size))
    x = torch.randn(size // 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(turns):
        totals = []
        for name, side in sides.items():
            for _ in range(WARM_UP):
                side.all_reduce(x)
            for _ in range(times):
                start = time.perf_counter()
                total = side.all_reduce(x)
                seconds[name].append(time.perf_counter() - start)
            totals.append(total)
        measured.same_bits &= all(torch.equal(total, totals[0]) for total in totals)


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a target is missed or the sides disagree."""
    parser = argparse.ArgumentParser("python -m benchmarks sum", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--ranks", type=positive, default=2, help="number of ranks; targets apply to 2")
    add("--sizes", type=positive, nargs="+", default=[4096, 1 << 20], help="bytes of fp32 terms")
    add("--turns", type=positive, default=20, help="turns of each side")
    options = parser.parse_args(arguments)
    if options.ranks < 2 or any(size % 4 for size in options.sizes):
        parser.error("--ranks must be at least 2, and --sizes multiples of 4")
    measured = measure(options.ranks, options.sizes, options.turns)
    if options.json:
        write_json(to_json(measured))
    else:
        show(measured, Console(width=110, highlight=False))
    return 0 if measured.ok else 1


def to_json(measured: Measured) -> dict[str, Any]:
    sizes = [
        {
            "bytes": size,
            "sides": {
                side: {"median": median(times), "min": min(times), "max": max(times)}
                for side, times in sides.items()
            },
        }
        for size, sides in measured.seconds.items()
    ]
    targets = [
        {"peer": t.peer, "bytes": t.size, "least": t.least, "reached": r, "ok": r >= t.least}
        for t, r in measured.targets()
    ]
    return {
        "ok": measured.ok,
        "ranks": measured.ranks,
        "same_bits": measured.same_bits,
        "seconds": sizes,
        "targets": targets,
    }


def show(measured: Measured, console: Console) -> None:
    table = Table(title=f"Sums over {measured.ranks} ranks: us, median (min to max)")
    table.add_column("")
    for size in measured.seconds:
        table.add_column(f"{size} bytes", justify="right")
    for side in SIDES:
        cells = [_cell(sides[side]) for sides in measured.seconds.values()]
        table.add_row(side, *cells)
    console.print(table)
    console.print("all sides gave the same bits" if measured.same_bits else "the sides DISAGREE")
    for target, ratio in measured.targets():
        verdict = "met" if ratio >= target.least else "MISSED"
        console.print(
            f"{target.size} bytes, shared memory over {target.peer}: {ratio:.1f} ×, at least "
            f"{target.least:g} ×: {verdict}"
        )


def _cell(seconds: Sequence[float]) -> str:
    middle, least, most = (1e6 * s for s in (median(seconds), min(seconds), max(seconds)))
    return f"{middle:.1f} ({least:.1f} to {most:.1f})"
