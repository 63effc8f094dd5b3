"""The program of a decode step's graph: lowered, scheduled, timed and verified."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tpcompile.ir.ops import PARTIAL_ATTENTION, arguments_of
from tpcompile.pause import paused_collector
from tpcompile.vm.groups.qkv import LOWERING_OF
from tpcompile.vm.lowering import LOWERINGS, Lowered, StepPlan, lower
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import Parts
from tpcompile.vm.proof.computes import NOT_CHECKED, Computed, check_values
from tpcompile.vm.proof.fault import Fault
from tpcompile.vm.proof.verify import check_program, refuse
from tpcompile.vm.schedule.assemble import Assembled, assemble
from tpcompile.vm.schedule.clock import Timing, timing_on
from tpcompile.vm.schedule.policies import POLICIES, policy_for
from tpcompile.vm.targets import TARGETS, Target


@dataclass(frozen=True)
class Scheduled:
    """A program for a target, the faults that the verifier found, and its simulated clock."""

    program: Program
    costs: tuple[float, ...]
    """The time of each instruction if all workers are loading, in µs, for policies."""
    critical_us: float
    """The time of a step with unlimited workers, each with the bandwidth of a worker alone."""
    faults: tuple[Fault, ...]
    timing: Timing | None
    """None if the program has faults, because it may never terminate."""
    seconds: dict[str, float]
    """The time that each phase took on this machine."""
    target: Target
    parts: tuple[Parts, ...]
    """The parts of each instruction's time."""
    computed: Computed = NOT_CHECKED
    """Whether the program computes the graph."""

    @property
    def lowering(self) -> str:
        """The lowering of heads in the program; "heads and rows" if ranks or layers differ."""
        kinds = {instruction.name for instruction in self.program.instructions}
        return " and ".join(lowering for kind, lowering in LOWERING_OF.items() if kind in kinds)

    @property
    def proved(self) -> Program:
        """The program. Raise `VerifyError` if it has faults."""
        refuse(self.faults)
        return self.program


def scheduled(
    gm: fx.GraphModule, target: Target, plan: StepPlan, policy: str | None = None
) -> Scheduled:
    """Lower, schedule, verify and time a graph that the decode pipeline made.

    The program generates many tokens in one launch. The default policy is that of the target.
    """
    with paused_collector():
        started = time.perf_counter()
        lowered = lower(gm, plan)
        parts = [instruction.parts(target) for instruction in lowered.instructions]
        costs = _costs(parts, target.worker_bytes_per_us)
        lowering = time.perf_counter() - started
        assembled = _assembled(lowered, costs, policy_for(target, policy))
        started = time.perf_counter()
        faults = tuple(check_program(assembled.program, assembled.parts))
        verifying = time.perf_counter() - started
        started = time.perf_counter()
        computed = NOT_CHECKED if faults else check_values(gm, assembled.program)
        faults += computed.faults
        computing = time.perf_counter() - started
        return Scheduled(
            assembled.program,
            costs,
            assembled.longest(_costs(parts, target.most_bytes_per_us)),
            faults,
            None if faults else timing_on(assembled.program, parts, target),
            {"lower": lowering, **assembled.seconds, "verify": verifying, "values": computing},
            target,
            tuple(parts),
            computed,
        )


def _costs(parts: Sequence[Parts], bytes_per_us: float) -> tuple[float, ...]:
    return tuple(part.total(bytes_per_us) for part in parts)


def _assembled(lowered: Lowered, costs: tuple[float, ...], policy: str) -> Assembled:
    return assemble(
        lowered.name,
        lowered.buffers,
        lowered.instructions,
        costs,
        policy,
        lowered.plan.workers,
        lowered.ranks,
        repeats=True,
        layers=lowered.layers,
    )


@dataclass(frozen=True)
class Verdict:
    """The verifier's result for one schedule."""

    policy: str
    lowering: str
    workers: int
    instructions: int
    counters: int
    faults: tuple[Fault, ...]
    computed: Computed

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def name(self) -> str:
        return f"policy {self.policy}, lowering {self.lowering}, {self.workers} workers"

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "lowering": self.lowering,
            "workers": self.workers,
            "instructions": self.instructions,
            "counters": self.counters,
            "computes_graph": self.computed.proved,
            "ok": self.ok,
        }


def is_decode_step(gm: fx.GraphModule) -> bool:
    """Return whether the decode pipeline made this graph, so that it can be lowered."""
    return any(node.target == PARTIAL_ATTENTION for node in gm.graph.nodes)


def verdicts(gm: fx.GraphModule) -> list[Verdict]:
    """Verify the schedules of every policy with every lowering, for two workers per rank.

    Policies order the same instructions, so their values are proved once per lowering.

    With few workers, checking the largest models takes seconds. A schedule for any other target is
    verified when it is made.
    """
    target = replace(TARGETS["cpu"], workers=2)
    all_verdicts, longest = [], max((StepPlan.max_seq_len, *_room_for_spans(gm)))
    for lowering in LOWERINGS:
        plan = StepPlan.on(target, max_seq_len=longest, lowering=lowering)
        lowered = lower(gm, plan)
        costs = tuple(instruction.cost(target) for instruction in lowered.instructions)
        computed = NOT_CHECKED
        for policy in POLICIES:
            assembled = _assembled(lowered, costs, policy)
            sizes = target.workers, len(assembled.program.instructions), assembled.program.counters
            faults = tuple(check_program(assembled.program, assembled.parts))
            if not faults and computed is NOT_CHECKED:  # the same for all policies
                computed = check_values(gm, assembled.program)
            all_verdicts.append(
                Verdict(policy, lowering, *sizes, faults or computed.faults, computed)
            )
    return all_verdicts


def _room_for_spans(gm: fx.GraphModule) -> Iterator[int]:
    """Yield the length, in tokens, of a sequence that has one block per span of an attention."""
    for node in gm.graph.nodes:
        if node.target == PARTIAL_ATTENTION:
            bound = arguments_of(node)
            yield bound["spans"] * bound["block"]
