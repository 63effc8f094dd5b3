"""The bytes that a step loads, and the time that they take at a target's bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import Parts
from tpcompile.vm.targets import Target


@dataclass(frozen=True)
class Bandwidth:
    """A lower bound of the time of a step: its bytes at the bandwidth of a rank's machine."""

    loaded: int
    """The bytes of weights and cache that the busiest rank loads."""
    target: Target

    @property
    def floor_us(self) -> float:
        """The time that the loads take at the full bandwidth."""
        return self.loaded / self.target.bytes_per_us

    def to_json(self) -> dict[str, Any]:
        target = self.target
        return {
            "loaded_bytes": self.loaded,
            "floor_us": round(self.floor_us, 3),
            "gb_per_s": round(target.bytes_per_us / 1000, 3),
            "worker_gb_per_s": round(target.most_bytes_per_us / 1000, 3),
        }

    def text(self, makespan: float | None) -> str:
        """Describe the bound, and its share of a step of `makespan` µs."""
        text = f"{self.floor_us:,.1f} µs for {self.loaded / 1e6:,.1f} MB at {_rate(self.target)}"
        return text if not makespan else f"{text}, {self.floor_us / makespan:.0%} of the makespan"

    @property
    def sharing(self) -> str:
        """Describe how workers share the bandwidth."""
        most = self.target.most_bytes_per_us
        if most == self.target.worker_bytes_per_us:
            return f"each worker has {most / 1000:,.1f} GB/s"
        return f"those that load share it, each up to {most / 1000:,.1f} GB/s"


def bandwidth_of(program: Program, parts: Sequence[Parts], target: Target) -> Bandwidth:
    """Return the bound for a program, given the parts of its instructions' times."""
    return Bandwidth(max(rank_loads(program, parts), default=0), target)


def rank_loads(program: Program, parts: Sequence[Parts]) -> list[int]:
    """Return the bytes that each rank loads."""
    loaded = [0] * program.ranks
    for instruction, part in zip(program.instructions, parts, strict=True):
        loaded[instruction.rank] += int(part.traffic)
    return loaded


def traffic_of(instruction: Any) -> int:
    """Return the bytes of weights and cache that an instruction loads."""
    traffic: int = instruction.traffic
    return traffic


def _rate(target: Target) -> str:
    return f"{target.bytes_per_us / 1000:,.0f} GB/s"
