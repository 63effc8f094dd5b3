"""The read bandwidth of this machine: a loop that only reads, on several threads."""

from __future__ import annotations

import ctypes
import mmap

import torch

from tpcompile.backends.native.build import kernels, library, paths
from tpcompile.cores import cores
from tpcompile.huge_pages import zeros


class ReadLoop:
    """A loop over `size` bytes of memory of its own, in huge pages if the system has them."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._bytes = torch.frombuffer(zeros(self.size), dtype=torch.uint8).fill_(1)

    def bandwidth(self, threads: int | None = None, size: int | None = None) -> float:
        """Read the bytes once, or the first `size`; return the bytes per second.

        The default is a thread per core.
        """
        read = self.size if size is None else min(size, self.size)
        seconds = library().tpc_read(
            kernels(paths()[0], torch.bfloat16),  # those of each dtype have the loop
            ctypes.c_void_p(self._bytes.data_ptr()),
            ctypes.c_int64(read),
            ctypes.c_int32(cores() if threads is None else threads),
        )
        return read / float(seconds)
