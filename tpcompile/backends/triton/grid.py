"""The places of the workers during a launch, which the kernel and the host share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpcompile.backends.host_copies import HostCopies
from tpcompile.vm.program import Program
from tpcompile.vm.targets import INT32_MAX


class Grid:
    """The turns of all workers in their queues, and the counters that they wait for."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program = program
        self.workers = len(program.queues) * program.sharing
        workers, queues = (self.workers,), (len(program.queues),)
        self._copies = HostCopies(
            {
                "before": (2,),  # one int64
                "turns": workers,
                "tickets": queues,
                "quotas": workers,
                "last": (1,),
                "stuck": workers,
            },
            device,
        )
        host = self._copies.host
        self._before = host["before"].view(torch.int64)
        self._turns, self._tickets, self._quotas = host["turns"], host["tickets"], host["quotas"]
        self._last, self._stuck = host["last"], host["stuck"]
        self._then = self._turns.clone()
        self._lengths = torch.tensor([len(self._queue(worker)) for worker in range(self.workers)])

    def begin(self, steps: int) -> None:
        """Put all workers before their first instruction of a launch of `steps` steps."""
        self._turns.copy_(torch.arange(self.workers) % self._program.sharing)
        self._tickets.fill_(self._program.sharing)
        self._quotas.fill_(INT32_MAX)
        self._last.fill_(steps)

    def arguments(self) -> dict[str, torch.Tensor]:
        """Return the arguments of the kernel by name.

        `before` is the number of steps of earlier launches, and `last` that of this one, which a
        step in which all sequences end lowers. `turns` holds the turn of each worker in its queue,
        over all steps, and `tickets` the next turn of each queue that workers share. `quotas` is
        the number of instructions that each worker may take until the kernel returns. `stuck` is
        the counter that each worker waits for, or -1.
        """
        device = self._copies.device
        return device | {"before": device["before"].view(torch.int64)}

    def upload(self) -> None:
        """Send the places to the device, with no worker stuck."""
        self._stuck.fill_(-1)
        self._then = self._turns.clone()
        self._copies.upload()

    def download(self) -> bool:
        """Wait for the kernel to return; return whether any worker made progress."""
        self._copies.download()
        return not torch.equal(self._then, self._turns) or self.done

    def allow_only(self, worker: int) -> None:
        """Let one worker take one instruction, and the others none."""
        self._quotas.zero_()
        self._quotas[worker] = 1

    def end(self) -> int:
        """End the launch; return the number of its steps."""
        done = int(self._last)
        self._before += done
        return done

    @property
    def done(self) -> bool:
        """Whether all workers have done their instructions of all steps."""
        return bool(self._ended.all())

    def worker_at(self, number: int) -> int:
        """Return the worker that takes an instruction next."""
        active = (~self._ended).nonzero().flatten().tolist()
        taker: int = next(worker for worker in active if self._next(worker) == number)
        return taker

    def waiting(self) -> list[str]:
        """Describe the waits of the first eight workers that have not ended."""
        instructions = self._program.instructions
        return [
            f"worker {worker} before {instructions[self._next(worker)].label} for counter "
            f"{int(self._stuck[worker])}"
            for worker in (~self._ended).nonzero().flatten().tolist()[:8]
        ]

    def _queue(self, worker: int) -> Sequence[int]:
        return self._program.queues[worker // self._program.sharing]

    def _next(self, worker: int) -> int:
        """Return the instruction that a worker takes next."""
        queue = self._queue(worker)
        return queue[int(self._turns[worker]) % len(queue)]

    @property
    def _ended(self) -> torch.Tensor:
        """Whether each worker has done its instructions of all steps."""
        return (self._lengths == 0) | (self._turns // self._lengths.clamp(min=1) >= self._last)
