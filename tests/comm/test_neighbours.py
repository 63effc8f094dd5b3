"""Tests of small exchanges between ranks over sockets, with threads as ranks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations

import pytest
import torch

from tpcompile.comm import Neighbours, PeerError
from tpcompile.comm.neighbours import SMALL_BYTES


@contextmanager
def ranks_of(count: int, eager: bool = True) -> Iterator[list[Neighbours]]:
    with ExitStack() as ends:
        sockets: list[list[socket.socket]] = [[] for _ in range(count)]
        for pair in combinations(range(count), 2):
            for rank, end in zip(pair, socket.socketpair(), strict=True):
                sockets[rank].append(ends.enter_context(end))
        yield [Neighbours(rank, rank_sockets, eager) for rank, rank_sockets in enumerate(sockets)]


def gather(ranks: list[Neighbours], size: int, times: int = 1) -> list[list[torch.Tensor]]:
    """Return the result of each exchange per rank; rank r sends bytes from r upwards."""
    rooms: list[list[torch.Tensor]] = [[] for _ in ranks]

    def work(rank: int) -> None:
        for turn in range(times):
            sent = (torch.arange(size) + rank + turn).to(torch.uint8)
            room = torch.zeros(len(ranks), size, dtype=torch.uint8)
            ranks[rank].gather(sent, room)
            rooms[rank].append(room)
            time.sleep(0.001 * (rank == turn % len(ranks)))  # each rank is late in turn

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return rooms


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 4096, SMALL_BYTES])
def test_every_rank_has_every_rank_s_bytes_in_order(count: int, size: int, eager: bool) -> None:
    with ranks_of(count, eager) as ranks:
        for rooms in gather(ranks, size, times=5):
            for turn, room in enumerate(rooms):
                for rank, row in enumerate(room):
                    assert torch.equal(row, (torch.arange(size) + rank + turn).to(torch.uint8))


def test_a_rank_that_is_gone_is_noticed_at_once() -> None:
    with ranks_of(2, eager=False) as ranks:
        ranks[1]._sockets[0].close()
        with pytest.raises(PeerError, match="connection to another rank was lost"):
            ranks[0].gather(torch.zeros(8, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.uint8))


def test_a_rank_that_goes_while_another_waits_is_noticed() -> None:
    with ranks_of(2, eager=False) as ranks:
        threading.Timer(0.2, lambda: ranks[1]._sockets[0].shutdown(socket.SHUT_RDWR)).start()
        with pytest.raises(PeerError, match="connection to another rank was lost"):
            ranks[0].gather(torch.zeros(8, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.uint8))


def test_sockets_that_hold_little_do_not_block_both_ranks() -> None:
    with ranks_of(2) as ranks:
        for rank in ranks:
            for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                rank._sockets[0].setsockopt(socket.SOL_SOCKET, kind, 4096)
        rooms = gather(ranks, SMALL_BYTES, times=3)
    assert [len(turns) for turns in rooms] == [3, 3]
