"""The parts of a step's time: its loads at the full bandwidth, and the causes of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tpcompile.inspect.bandwidth import Bandwidth, rank_loads
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import Parts
from tpcompile.vm.schedule.clock import Timing
from tpcompile.vm.targets import Target

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "waiting": "waiting for other instructions",
        "dispatch": "dispatch",
        "values": "norms and activations",
        "exchange": "exchange between ranks",
        "arithmetic": "arithmetic",
    }
)
"""The causes of time without loads, with their descriptions."""


@dataclass(frozen=True)
class Losses:
    """The parts of a step's time on the rank that loads most. Their sum is the makespan."""

    limit: Bandwidth
    makespan: float
    lost_us: Mapping[str, float]
    """The time above the bandwidth limit, by cause."""

    def to_json(self) -> dict[str, Any]:
        return {cause: round(us, 3) for cause, us in self.lost_us.items()}

    def text(self) -> str:
        """Describe the parts in one line, without those that round to 0."""
        parts = {"bandwidth limit": self.limit.floor_us}
        parts |= {CAUSES[cause]: us for cause, us in self.lost_us.items() if us >= 0.05}
        whole = self.makespan or 1.0
        return " + ".join(f"{us:,.1f} µs ({us / whole:.0%}) {name}" for name, us in parts.items())


def losses_of(program: Program, parts: Sequence[Parts], timing: Timing, target: Target) -> Losses:
    """Divide the time above the bandwidth limit among its causes.

    Each worker is entitled to an equal share of the bandwidth. Time during which it uses less is a
    deficit, attributed to what the worker does instead. Workers that load faster than their share
    make up for some of the deficits, in proportion.
    """
    loads = rank_loads(program, parts)
    limit = Bandwidth(max(loads), target)
    rank = loads.index(limit.loaded)
    workers = len(timing.idle) // program.ranks
    share = target.bytes_per_us / max(workers, 1)
    deficits = dict.fromkeys(CAUSES, 0.0)
    deficits["waiting"] = share * sum(timing.idle[rank * workers : (rank + 1) * workers])
    for number, instruction in enumerate(program.instructions):
        if instruction.rank == rank:
            spent = timing.finishes[number] - timing.starts[number]
            for cause, us in _busy(instruction, parts[number], spent, target).items():
                deficits[cause] += share * us
    return Losses(limit, timing.makespan, _scaled(deficits, timing.makespan - limit.floor_us))


def _busy(instruction: Any, parts: Parts, spent: float, target: Target) -> dict[str, float]:
    """Return the time of an instruction during which it does not load at a worker's share."""
    fixed = min(parts.fixed_us, spent)
    dispatch = min(target.instruction_us, fixed)
    values = min(instruction.values * target.value_us, fixed - dispatch)
    loading = parts.traffic / target.worker_bytes_per_us
    return {
        "dispatch": dispatch,
        "values": values,
        "exchange": fixed - dispatch - values,
        "arithmetic": max(0.0, spent - fixed - loading),
    }


def _scaled(deficits: Mapping[str, float], lost_us: float) -> dict[str, float]:
    whole = sum(deficits.values())
    return {
        cause: lost_us * deficit / whole if whole else 0.0 for cause, deficit in deficits.items()
    }
