"""Ranks of one machine: what is small goes from each to each over sockets of their own.

Between two ranks of one thread each a sum of 2 KB takes 0.05 ms this way and 0.5 ms or more
through gloo, whose threads have to wake each other; a token needs two sums a layer.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from tpcompile.errors import RankError

SMALL_BYTES = 64 * 1024
"""Beyond it bandwidth counts for more than latency, and gloo is as good."""

_LOOK_S = 0.002
"""How long to look again and again before going to sleep: a rank that sleeps wakes up late."""


class PeerError(RankError):
    """Another rank is gone, and this one cannot go on."""


class Neighbours:
    """This rank's sockets to the others, by rank. `eager` ranks do not sleep at once: they need a
    core each."""

    def __init__(self, rank: int, others: Sequence[socket.socket], eager: bool) -> None:
        self._rank = rank
        self._others = list(others)
        self._look = _LOOK_S if eager else 0.0
        for other in self._others:
            other.setblocking(False)

    def gather(self, own: torch.Tensor, found: torch.Tensor) -> None:
        """The bytes of every rank's `own` in the rows of `found`."""
        sent: Any = own.numpy()
        received: Any = found.numpy()
        received[self._rank] = sent
        rows = (row for rank, row in enumerate(received) if rank != self._rank)
        open_ends = [
            _Exchange(other, memoryview(sent), memoryview(row))
            for other, row in zip(self._others, rows, strict=True)
        ]
        until = time.perf_counter() + self._look
        while open_ends:
            moved = [end.move() for end in open_ends]
            open_ends = [end for end in open_ends if end.sent or end.room]
            if not any(moved) and open_ends:
                self._rest(open_ends, until)

    def _rest(self, ends: list[_Exchange], until: float) -> None:
        if time.perf_counter() < until:
            os.sched_yield()
            return
        select.select(
            [end.other for end in ends if end.room], [end.other for end in ends if end.sent], []
        )


@dataclass
class _Exchange:
    """What is still to be sent to another rank, and to come from it. Both go on at once: two ranks
    that only sent would wait for each other where sockets hold little."""

    other: socket.socket
    sent: memoryview
    room: memoryview

    def move(self) -> bool:
        """Send and receive what can be; whether anything could."""
        before = len(self.sent) + len(self.room)
        try:
            if self.sent:
                self._send()
            if self.room:
                self._receive()
        except (OSError, EOFError) as error:
            raise _gone(error) from error
        return len(self.sent) + len(self.room) < before

    def _send(self) -> None:
        with suppress(BlockingIOError):
            self.sent = self.sent[self.other.send(self.sent) :]

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            count = self.other.recv_into(self.room)
            if not count:
                raise EOFError("it closed the connection")
            self.room = self.room[count:]


def _gone(error: Exception) -> PeerError:
    return PeerError(
        "Another rank is gone",
        got=str(error),
        hint="Look at what the other ranks print: one of them failed first",
    )
