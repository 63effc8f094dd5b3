"""The report on a schedule, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tpcompile.inspect.bandwidth import Bandwidth, bandwidth_of
from tpcompile.inspect.losses import Losses, losses_of
from tpcompile.inspect.tables import table_text
from tpcompile.inspect.timeline import Timeline
from tpcompile.vm.proof.fault import Fault
from tpcompile.vm.schedule.clock import Timing
from tpcompile.vm.schedule.scheduled import Scheduled

_MOST_FAULTS = 10
_MOST_LABELS = 50
"""The maximum number of labels listed for the critical path."""


@dataclass(frozen=True)
class ScheduleReport:
    """A report on a scheduled, timed and verified program."""

    choices: dict[str, Any]
    """The model, target, workers, policy and other choices, by name."""
    schedule: Scheduled

    def to_json(self) -> dict[str, Any]:
        schedule, clock = self.schedule, self.schedule.timing
        return {
            **self.choices,
            "lowering": self.schedule.lowering or self.choices.get("lowering"),
            "instructions": len(schedule.program.instructions),
            "counters": schedule.program.counters,
            "makespan_us": None if clock is None else round(clock.makespan, 3),
            "critical_path_us": round(schedule.critical_us, 3),
            "bandwidth": self._bandwidth.to_json()
            | {"lost_us": None if self._losses is None else self._losses.to_json()},
            "idle": None if clock is None else round(self._idle(clock), 6),
            "idle_us": None if clock is None else [round(us, 3) for us in clock.idle],
            "critical_path": None if clock is None else self._chain(clock),
            "verified": not schedule.faults,
            "computes_graph": schedule.computed.proved,
            "without_meaning": list(schedule.computed.unproved),
            "errors": [{"rule": fault.rule, "got": fault.message} for fault in schedule.faults],
            "kinds": [
                {"kind": kind, "count": count, "us": round(us, 3)}
                for kind, count, us in self._kinds()
            ],
            "seconds": {phase: round(spent, 4) for phase, spent in schedule.seconds.items()},
        }

    def table(self) -> str:
        """Format two tables: the whole schedule, and its instructions by kind."""
        from rich.table import Table

        whole = Table(show_header=False)
        whole.add_column(min_width=20)
        whole.add_column(min_width=44, overflow="fold")
        for name, value in self.figures:
            whole.add_row(name, value)
        kinds = Table(title="instructions", title_justify="left")
        kinds.add_column("kind", min_width=20)
        for column in ("count", "µs each", "µs total", "share"):
            kinds.add_column(column, justify="right")
        work = sum(self._costs) or 1.0
        for kind, count, us in self._kinds():
            mean = f"{us / count:,.2f}"
            kinds.add_row(kind, f"{count:,}", mean, f"{us:,.1f}", f"{us / work:.1%}")
        return table_text(whole, kinds) + fault_lines(self.schedule.faults)

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The choices and results by name, as text."""
        options = [
            (name, f"{value:,}" if isinstance(value, int) else str(value))
            for name, value in (self.choices | self._lowering).items()
        ]
        clock = []
        if self.schedule.timing is not None and self._losses is not None:
            clock = [
                ("makespan", f"{self.schedule.timing.makespan:,.1f} µs"),
                ("idle", f"{self._idle(self.schedule.timing):.1%}"),
                ("where the time goes", self._losses.text()),
            ]
        return [
            *((name.replace("_", " "), value) for name, value in options),
            ("instructions", f"{len(self.schedule.program.instructions):,}"),
            ("counters", f"{self.schedule.program.counters:,}"),
            *clock,
            ("critical path", f"{self.schedule.critical_us:,.1f} µs"),
            ("bandwidth limit", self._limit()),
            ("workers' bandwidth", self._bandwidth.sharing),
            (
                "verified",
                f"NO: {count_of(self.schedule.faults)}" if self.schedule.faults else "yes",
            ),
            ("computes the graph", self.schedule.computed.summary),
        ]

    @property
    def _lowering(self) -> dict[str, str]:
        """The lowering of the program, and who chose it if the caller did not."""
        lowering, requested = self.schedule.lowering, self.choices.get("lowering")
        if not lowering:
            return {}
        note = "" if lowering == requested else f", chosen by {requested}"
        return {"lowering": lowering + note}

    @cached_property
    def _bandwidth(self) -> Bandwidth:
        if self._losses is not None:
            return self._losses.limit
        schedule = self.schedule
        return bandwidth_of(schedule.program, schedule.parts, schedule.target)

    @cached_property
    def _losses(self) -> Losses | None:
        schedule, clock = self.schedule, self.schedule.timing
        if clock is None:
            return None
        return losses_of(schedule.program, schedule.parts, clock, schedule.target)

    def _limit(self) -> str:
        clock = self.schedule.timing
        return self._bandwidth.text(None if clock is None else clock.makespan)

    def _kinds(self) -> list[tuple[str, int, float]]:
        """Return each kind with its count and total time, in program order."""
        kinds: dict[str, tuple[int, float]] = {}
        for instruction, cost in zip(self.schedule.program.instructions, self._costs, strict=True):
            count, us = kinds.get(instruction.name, (0, 0.0))
            kinds[instruction.name] = count + 1, us + cost
        return [(kind, count, us) for kind, (count, us) in kinds.items()]

    @property
    def _costs(self) -> tuple[float, ...]:
        """The simulated time of each instruction."""
        return self.schedule.costs if self.schedule.timing is None else self.schedule.timing.costs

    def _chain(self, timing: Timing) -> dict[str, Any]:
        """Return the length of the critical path, and the labels of its first instructions."""
        chain = Timeline(self.schedule.program, timing).chain
        instructions = self.schedule.program.instructions
        return {
            "count": len(chain),
            "labels": [instructions[number].label for number in chain[:_MOST_LABELS]],
        }

    def _idle(self, timing: Timing) -> float:
        return Timeline(self.schedule.program, timing).idle


def count_of(faults: Sequence[Fault]) -> str:
    count = sum(fault.count for fault in faults)
    return "1 fault" if count == 1 else f"{count:,} faults"


def fault_lines(faults: Sequence[Fault]) -> str:
    """Format the first faults, one per line, and the number of the others."""
    lines = [f"  {fault.rule}: {fault.message}\n" for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        lines.append(f"  not shown: {count_of(faults[_MOST_FAULTS:])}\n")
    return "".join(lines)
