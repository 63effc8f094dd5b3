"""From instructions to a program: what depends on what, who runs it, and what waits for what."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.errors import UsageError
from tpcompile.pause import paused_collector
from tpcompile.vm.program import Buffer, Instruction, Program
from tpcompile.vm.proof.counters import assign_counters
from tpcompile.vm.proof.dependencies import Group, dependencies
from tpcompile.vm.schedule.policies import policy_of, schedule


@dataclass(frozen=True)
class Assembled:
    """A program, and how it came about."""

    program: Program
    groups: list[tuple[Group, ...]]
    """What must be done before each instruction, whoever runs it."""
    seconds: dict[str, float]
    """What each phase took."""


@paused_collector()
def assemble(
    name: str,
    buffers: Sequence[Buffer],
    instructions: Sequence[Instruction],
    costs: Sequence[float],
    policy: str = "critical-path",
    workers: int = 1,
    ranks: int = 1,
    repeats: bool = False,
) -> Assembled:
    """The program of these instructions for so many workers on each rank; it is not verified.

    `costs` are the times that the policy goes by. A program that `repeats` begins no step before
    the one before is done.
    """
    for instruction in instructions:
        if not 0 <= instruction.rank < ranks:
            raise UsageError(
                f"{instruction.label} belongs to rank {instruction.rank}",
                expected=f"a rank from 0 to {ranks - 1}",
            )
    sharing = workers if policy_of(policy).dynamic else 1
    clock = [time.perf_counter()]
    groups = dependencies(instructions)
    clock.append(time.perf_counter())
    ranks_of = [instruction.rank for instruction in instructions]
    queues = schedule(policy, groups, costs, workers, ranks_of, ranks)
    clock.append(time.perf_counter())
    order = assign_counters(groups, queues, sharing, repeats)
    program = Program(
        tuple(buffers),
        tuple(instructions),
        queues,
        order.waits,
        order.signals,
        ranks,
        sharing,
        repeats,
        name,
    )
    clock.append(time.perf_counter())
    names = ("dependencies", "schedule", "counters")
    seconds = {n: clock[at + 1] - clock[at] for at, n in enumerate(names)}
    return Assembled(program, groups, seconds)
