"""Assembly of instructions into a program: dependencies, queues, and waits and signals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.errors import UsageError
from tpcompile.pause import paused_collector
from tpcompile.vm.program import Buffer, Instruction, Program
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.counters import assign_counters
from tpcompile.vm.proof.dependencies import dependencies_of
from tpcompile.vm.proof.waiting import Groups, Uses
from tpcompile.vm.schedule.policies import DEFAULT_POLICY, POLICIES, schedule


@dataclass(frozen=True)
class Assembled:
    """A program, the dependencies that it was made from, and the time of each phase."""

    program: Program
    parts: Parts
    """The parts of buffers that the instructions access, which the verifier needs too."""
    groups: Groups
    """For each instruction, the groups that must complete before it starts, on any worker."""
    seconds: dict[str, float]
    """The time that each phase took."""


@paused_collector()
def assemble(
    name: str,
    buffers: Sequence[Buffer],
    instructions: Sequence[Instruction],
    costs: Sequence[float],
    policy: str = DEFAULT_POLICY,
    workers: int = 1,
    ranks: int = 1,
    repeats: bool = False,
) -> Assembled:
    """Make a program of these instructions for `workers` workers on each rank; it is not verified.

    The policy uses `costs` as the times of the instructions. If the program `repeats`, no step
    starts before the previous one is complete.
    """
    for instruction in instructions:
        if not 0 <= instruction.rank < ranks:
            raise UsageError(
                f"{instruction.label} belongs to rank {instruction.rank}, which does not exist",
                expected=f"a rank from 0 to {ranks - 1}",
            )
    sharing = workers if POLICIES[policy].dynamic else 1
    clock = [time.perf_counter()]
    parts = Parts(tuple(instructions))
    groups = Uses(dependencies_of(parts))
    clock.append(time.perf_counter())
    ranks_of = [instruction.rank for instruction in instructions]
    queues = schedule(policy, groups, costs, workers, ranks_of, ranks)
    clock.append(time.perf_counter())
    order = assign_counters(groups, queues, sharing, repeats)
    program = Program(
        tuple(buffers),
        tuple(parts.instructions),
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
    return Assembled(program, parts, groups, seconds)
