"""Sums and gathers between ranks of one machine, over memory that they share.

A sum of 4 KB takes a few microseconds, since no system call is needed if all ranks arrive in time.
`sources/exchange.cpp` has the rounds in which ranks post their terms and read those of the others.
"""

from __future__ import annotations

import ctypes
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from tpcompile.comm.neighbours import PeerError
from tpcompile.cpp import CppLibrary

LIBRARY = CppLibrary(
    name="shared-memory sum", sources=Path(__file__).parent / "sources", units={"exchange": ()}
)

SLOT_BYTES = 256 * 1024
"""The largest term of a round; larger values take several."""

PIECES_BYTES = 64 * 1024
"""From this size on more than two ranks sum a piece each, instead of every rank the whole."""

_MARK_BYTES = 128
_PAGE = 4096
_PAUSES = 20
_LOOK_US = 2000
"""The time to poll before sleeping, since a sleeping rank wakes up late."""
_KINDS = {
    (torch.float32, torch.float32): 0,
    (torch.bfloat16, torch.float32): 1,
    (torch.bfloat16, torch.bfloat16): 2,
}
"""Sums of the library, by the dtypes of the terms and of the sum."""


class Peer(Protocol):
    """A handle to another rank. Its file becomes readable when the rank has ended."""

    def fileno(self) -> int: ...


class _Exchange(ctypes.Structure):
    """`tpc_exchange` of the library."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("slots", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("ranks", ctypes.c_int32),
        ("round", ctypes.c_uint32),
        ("pauses", ctypes.c_int32),
        ("yield_us", ctypes.c_int32),
        ("crowded", ctypes.c_int32),
    )


def exchange_bytes(ranks: int) -> int:
    """Return the size of the memory that the ranks share."""
    return _slots(ranks) + 2 * ranks * SLOT_BYTES


class SharedExchange:
    """This rank's view of the shared memory.

    If `eager`, poll before sleeping; this needs one core per rank. All ranks must make the same
    calls with values of the same sizes.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: Any,
        rank: int,
        ranks: int,
        *,
        eager: bool,
        peers: Sequence[Peer],
        timeout: float,
    ) -> None:
        """Attach to `memory`, a writable buffer of `exchange_bytes`, zero at first."""
        self._rank, self._ranks = rank, ranks
        self._whole = SLOT_BYTES if ranks == 2 else PIECES_BYTES
        self._timeout = timeout
        self._peers = peers
        self._memory = ctypes.c_char.from_buffer(memory)
        self._exchange = _Exchange(
            ctypes.addressof(self._memory),
            _slots(ranks),
            SLOT_BYTES,
            rank,
            ranks,
            0,
            _PAUSES if eager else 0,
            _LOOK_US if eager else 0,
        )
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._address = ctypes.c_void_p(ctypes.addressof(self._exchange))
        kind = ctypes.c_int32
        self._post, self._sum = library["tpc_post"], library["tpc_sum"]
        self._post_and_sum, self._gather = library["tpc_post_and_sum"], library["tpc_gather"]
        self._post.argtypes = (pointer, pointer, size)
        self._post.restype = None
        self._post_and_sum.argtypes = (pointer, pointer, size, kind, size, pointer)
        self._sum.argtypes = (pointer, kind, size, size, pointer)
        self._gather.argtypes = (pointer, size, pointer, size, size)

    def adds(self, dtype: torch.dtype, total: torch.dtype) -> bool:
        """Return whether terms of `dtype` can be added in `total`."""
        return total == torch.float32 or (dtype, total) in _KINDS

    def all_reduce(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of every rank's `x`, with the bits of `tree_sum`."""
        x, kind = _term(x, dtype)
        total = torch.empty_like(x, dtype=dtype)
        count, size, start, output = x.numel(), x.nbytes, x.data_ptr(), total.data_ptr()
        if size <= self._whole:
            if size and not self._post_and_sum(self._address, start, size, kind, count, output):
                self._wait(partial(self._sum, self._address, kind, 0, count, output))
            return total
        width, sum_width = x.element_size(), total.element_size()
        chunk = SLOT_BYTES // max(width, sum_width)
        for first in range(0, count, chunk):
            terms = min(chunk, count - first)
            self._post(self._address, start + first * width, terms * width)
            self._all_reduced(kind, terms, output + first * sum_width, sum_width)
        return total

    def _all_reduced(self, kind: int, count: int, output: int, width: int) -> None:
        """Sum the posted terms; more than two ranks sum a piece each, and gather the pieces."""
        if self._ranks == 2:
            self._wait(partial(self._sum, self._address, kind, 0, count, output))
            return
        piece = -(-count // self._ranks)
        first = min(self._rank * piece, count)
        last = min(first + piece, count)
        local_output = output + first * width
        self._wait(partial(self._sum, self._address, kind, first, last, local_output))
        self._post(self._address, local_output, (last - first) * width)
        sizes = piece * width, output, piece * width, count * width
        self._wait(partial(self._gather, self._address, *sizes))

    def reduce_scatter(
        self, x: torch.Tensor, start: int, stop: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return rows `start` to `stop` of the sum of every rank's `x`; each rank has its own."""
        x, kind = _term(x, dtype)
        total = torch.empty((stop - start, *x.shape[1:]), dtype=dtype)
        row = x.numel() // len(x) if len(x) else 0
        width, output, end = x.element_size(), total.data_ptr(), stop * row
        chunk = SLOT_BYTES // width
        for first in range(0, x.numel(), chunk):
            count = min(chunk, x.numel() - first)
            self._post(self._address, x.data_ptr() + first * width, count * width)
            low, high = max(start * row, first), min(end, first + count)
            address = output + (low - start * row) * total.element_size()
            bounds = (low - first, max(low, high) - first)
            self._wait(partial(self._sum, self._address, kind, *bounds, address))
        return total

    def gather(self, local: torch.Tensor, gathered: torch.Tensor) -> None:
        """Write the bytes of every rank's `local` to the rows of `gathered`."""
        size = len(local)
        whole = size * self._ranks
        for first in range(0, size, SLOT_BYTES):
            count = min(SLOT_BYTES, size - first)
            self._post(self._address, local.data_ptr() + first, count)
            sizes = count, gathered.data_ptr() + first, size, whole
            self._wait(partial(self._gather, self._address, *sizes))

    def lost(self) -> bool:
        """Return whether another rank has ended."""
        ended = select.poll()
        for peer in self._peers:
            ended.register(peer, select.POLLIN)
        return bool(ended.poll(0))

    def _wait(self, ask: Callable[[], int]) -> None:
        """Poll until the other ranks have arrived. Python handles signals between polls."""
        if ask():
            return
        until = time.monotonic() + self._timeout
        while not ask():
            if self.lost() and not ask():  # a rank that has ended may have posted before
                raise PeerError(
                    "The connection to another rank was lost",
                    got="a rank that has ended",
                    hint="See the output of the other ranks: one of them failed first",
                )
            if time.monotonic() > until:
                raise PeerError(
                    "Another rank did not answer in time",
                    got=f"no answer for {self._timeout:g} s",
                    hint="See the output of the other ranks: one of them failed first",
                )


def _slots(ranks: int) -> int:
    """Return the offset of the slots, after the marks of the ranks."""
    return -(-ranks * _MARK_BYTES // _PAGE) * _PAGE


def _term(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Return a contiguous term, and the kind of its sum. Other dtypes are converted first."""
    kind = _KINDS.get((x.dtype, dtype))
    if kind is None:
        return x.to(dtype).contiguous(), _KINDS[dtype, dtype]
    return x.contiguous(), kind
