"""Small messages between ranks of one machine, over one socket per pair of ranks.

A sum of 2 KB between two ranks of one thread each takes 0.05 ms over sockets and 0.5 ms or more
over gloo, whose threads must wake each other. Each token needs two sums per layer.
"""

from __future__ import annotations

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
"""The largest message to send in this way; for larger ones gloo is as fast."""

_LOOK_S = 0.002
"""The time to poll before sleeping, since a sleeping rank wakes up late."""


class PeerError(RankError):
    """An error in the communication with another rank; this rank cannot continue."""


class Neighbours:
    """This rank's sockets to the others, by rank.

    If `eager`, poll before sleeping; this needs one core per rank.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket], eager: bool) -> None:
        self._rank = rank
        self._sockets = list(sockets)
        self._look = _LOOK_S if eager else 0.0
        for other in self._sockets:
            other.setblocking(False)

    def gather(self, local: torch.Tensor, gathered: torch.Tensor) -> None:
        """Write the bytes of every rank's `local` to the rows of `gathered`."""
        sent: Any = local.numpy()
        received: Any = gathered.numpy()
        received[self._rank] = sent
        rows = (row for rank, row in enumerate(received) if rank != self._rank)
        open_ends = [
            _Exchange(other, memoryview(sent), memoryview(row))
            for other, row in zip(self._sockets, rows, strict=True)
        ]
        until = time.perf_counter() + self._look
        while open_ends:
            moved = [end.move() for end in open_ends]
            open_ends = [end for end in open_ends if end.sent or end.room]
            if not any(moved) and open_ends:
                self._wait(open_ends, until)

    def _wait(self, ends: list[_Exchange], until: float) -> None:
        if time.perf_counter() < until:
            return
        select.select(
            [end.other for end in ends if end.room], [end.other for end in ends if end.sent], []
        )


@dataclass
class _Exchange:
    """The bytes still to send to and to receive from another rank.

    Both directions progress together: two ranks that only sent would deadlock when the buffers of
    their sockets are full.
    """

    other: socket.socket
    sent: memoryview
    room: memoryview

    def move(self) -> bool:
        """Send and receive without blocking; return whether any bytes were transferred."""
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
                raise EOFError("the other rank closed its end")
            self.room = self.room[count:]


def _gone(error: Exception) -> PeerError:
    return PeerError(
        "The connection to another rank was lost",
        got=f"the error: {error}",
        hint="See the output of the other ranks: one of them failed first",
    )
