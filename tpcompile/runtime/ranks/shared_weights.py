"""Parameters in unnamed shared memory, written by one process and used by another."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tpcompile.errors import RankError
from tpcompile.ir.pieces import Read, evaluate
from tpcompile.ir.recipe import shape_of
from tpcompile.runtime.ranks.channel import tensor_bytes
from tpcompile.runtime.ranks.descriptors import memory_file
from tpcompile.runtime.ranks.rank import RankModule, laid_out

_ALIGN = mmap.PAGESIZE
"""Each parameter has its own pages, so that they can be freed."""


@dataclass(frozen=True)
class SharedWeights:
    """The place of each parameter of a rank in a file: start, shape and dtype."""

    places: Mapping[str, tuple[int, tuple[int, ...], torch.dtype]]
    size: int

    def attach(self, memory: mmap.mmap, module: RankModule) -> dict[str, torch.Tensor]:
        """Return the parameters as views; the memory stays mapped as long as one of them exists.

        A parameter that is reordered is copied, and its pages are freed.
        """
        found = {}
        for name, (start, shape, dtype) in self.places.items():
            count = math.prod(shape)
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
            found[name] = laid_out(module.parameters[name], flat.view(shape))
            if found[name].is_mkldnn and hasattr(mmap, "MADV_REMOVE"):
                memory.madvise(mmap.MADV_REMOVE, start, _whole_pages(flat.nbytes))
        return found


def _whole_pages(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def places_of(module: RankModule) -> SharedWeights:
    """Assign each parameter of a rank a place in a file."""
    places = {}
    size = 0
    for name, (recipe, dtype, _) in module.parameters.items():
        shape = shape_of(recipe)
        places[name] = (size, shape, dtype)
        size += _whole_pages(math.prod(shape) * dtype.itemsize)
    return SharedWeights(places, max(size, 1))


def fill(module: RankModule, shared: SharedWeights, read: Read, loaded: Callable[[], None]) -> int:
    """Write the parameters to an unnamed file and return it; evaluate one parameter at a time."""
    file = memory_file("tpcompile-weights")
    try:
        with _room(module.rank, shared.size):
            os.truncate(file, shared.size)
        for name, (recipe, dtype, _) in module.parameters.items():
            value = evaluate(recipe, read).detach().to("cpu", dtype).contiguous()
            with _room(module.rank, shared.size):
                _write(file, tensor_bytes(value), shared.places[name][0])
            loaded()
    except BaseException:
        os.close(file)
        raise
    return file


@contextmanager
def _room(rank: int, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RankError(
            "There is not enough memory to send the weights to a worker",
            where=f"rank {rank}",
            got=f"the error: {error.strerror or error}",
            expected=f"{size / 1e6:,.0f} MB of free memory, or of free space for temporary files",
        ) from error


def _write(file: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written
