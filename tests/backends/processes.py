"""Run the executor of each rank in its own process, as if they were a single executor."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch

from tests.backends.reference.stepping import Case
from tests.launches import CONTEXT, File
from tpcompile.backends.executor import EXECUTORS
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.share import RankShare
from tpcompile.runtime.ranks.channel import Channel
from tpcompile.runtime.ranks.descriptors import memory_file, socket_pair
from tpcompile.runtime.ranks.step import EncodedCode, StepCode
from tpcompile.vm.program import Role


class Processes:
    """Executor that forwards each call to all ranks and raises the first error of any rank."""

    def __init__(self, executor: str, case: Case, poison: bool = True) -> None:
        memory = case.memory(poison)
        code = StepCode(case.program, len(case.lengths), case.rotation, executor)
        file = memory_file("tests")
        os.truncate(file, code.memory)
        self._channels, self._processes = [], []
        for rank, cache in enumerate(memory.values(Role.CACHE)):
            parent, child = socket_pair()
            process = CONTEXT.Process(
                target=_serve, args=(rank, File(child.fileno()), File(file)), daemon=True
            )
            process.start()
            child.close()
            self._channels.append(Channel(parent))
            self._processes.append(process)
            weights = {
                buffer.name: tensor
                for buffer, tensor in zip(case.program.buffers, memory.tensors, strict=True)
                if buffer.role == Role.WEIGHT and buffer.rank == rank
            }
            self._channels[rank].send((code.encoded(), weights, cache, poison))
        os.close(file)

    def place(self, *args: Any, **options: Any) -> None:
        self._all("place", args, options)

    def run(self, steps: int = 1) -> torch.Tensor:
        replies = self._all("run", (steps,), {})
        assert all(torch.equal(reply, replies[0]) for reply in replies)
        tokens: torch.Tensor = replies[0]
        return tokens

    @property
    def logits(self) -> torch.Tensor:
        return torch.cat(self._all("logits", (), {}), 1)

    def close(self) -> None:
        for channel, process in zip(self._channels, self._processes, strict=True):
            channel.close()
            process.join(30)
            assert process.exitcode == 0

    def _all(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        for channel in self._channels:
            channel.send((name, args, options))
        replies = [channel.receive() for channel in self._channels]
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors:
            raise errors[0]
        return replies


def _serve(rank: int, connection: File, file: File) -> None:
    torch.set_num_threads(1)
    channel = Channel(socket.socket(fileno=connection.number))
    sent: tuple[EncodedCode, dict[str, torch.Tensor], torch.Tensor, bool] = channel.receive()
    code, weights, cache, poison = sent[0].decoded(), *sent[1:]
    share = RankShare(code.program, rank, mmap.mmap(file.number, 0))
    held = code.program.buffers[code.program.one_per_rank(Role.CACHE)[rank]]
    placed = torch.empty_strided(cache.shape, held.strides(cache.shape)).copy_(cache)
    memory = StepMemory(
        code.program,
        lambda _, name: weights[name],
        code.rotation,
        [placed],
        share=share,
        poison=poison,
    )
    executor = EXECUTORS[code.executor](memory)
    while True:
        try:
            name, args, options = channel.receive()
        except Exception:  # the peer closed the connection
            return
        try:
            attribute = getattr(executor, name)
            channel.send(attribute(*args, **options) if callable(attribute) else attribute)
        except Exception as error:  # raised again in the test's process
            channel.send(error)
