"""Parameters in unnamed shared memory, written by one process and copied by another."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tpcompile.ir.pieces import Read, evaluate
from tpcompile.runtime.ranks.channel import tensor_bytes
from tpcompile.runtime.ranks.descriptors import memory_file
from tpcompile.runtime.ranks.parameters import Parameters, Places, enough_memory
from tpcompile.runtime.ranks.rank import RankModule

_CPU = torch.device("cpu")
_PURPOSE = "to send the weights to a worker"


@dataclass(frozen=True)
class SharedWeights:
    """The parameters of a rank in a file of memory."""

    places: Places

    def copied(self, file: int, module: RankModule) -> dict[str, torch.Tensor]:
        """Copy the parameters to memory of this process, and free the file's memory one by one."""
        memory = mmap.mmap(file, self.places.size)
        parameters, weights = Parameters(module, _CPU), {}
        for name in self.places.by_name:
            weights[name] = parameters.copy(name, self.places.view(memory, name))
            self.places.free(memory, name)
        return weights


def fill(module: RankModule, places: Places, read: Read, loaded: Callable[[], None]) -> int:
    """Write the parameters to an unnamed file and return it; evaluate one parameter at a time."""
    file = memory_file("tpcompile-weights")
    try:
        with enough_memory(module.rank, places.size, _PURPOSE):
            os.truncate(file, places.size)
        for name, (recipe, dtype, _) in module.parameters.items():
            value = evaluate(recipe, read).detach().to("cpu", dtype).contiguous()
            with enough_memory(module.rank, places.size, _PURPOSE):
                _write(file, tensor_bytes(value), places.by_name[name][0])
            loaded()
    except BaseException:
        os.close(file)
        raise
    return file


def _write(file: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written
