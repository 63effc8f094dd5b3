"""Measured steps of a program beside the simulated one: a trace, a table and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from tpcompile.inspect.tables import table_text
from tpcompile.inspect.timeline import Timeline
from tpcompile.inspect.trace import write_trace
from tpcompile.vm.program import Program
from tpcompile.vm.schedule.clock import Timing
from tpcompile.vm.schedule.measured import MeasuredSteps, timing_at
from tpcompile.vm.targets import Target


@dataclass(frozen=True)
class KindTimes:
    """The instructions of one kind, and their total times in µs."""

    kind: str
    count: int
    predicted_us: float
    measured_us: float
    """From ready to done."""
    wait_us: float
    """From taken to ready."""


@dataclass(frozen=True)
class StepTrace:
    """Measured steps and the simulated step of the same program."""

    title: str
    simulated: Timing
    """The simulated step."""
    measured: MeasuredSteps

    @property
    def program(self) -> Program:
        """The program of the steps."""
        return self.measured.program

    @property
    def ratio(self) -> float:
        """The predicted time of a step over the measured one."""
        return self.simulated.makespan / self.measured.step_us

    @property
    def kinds(self) -> list[KindTimes]:
        """The times of the last measured step by kind, in program order."""
        kinds: dict[str, KindTimes] = {}
        for kind, *times in self._times():
            past = kinds.get(kind, KindTimes(kind, 0, 0.0, 0.0, 0.0))
            before = past.predicted_us, past.measured_us, past.wait_us
            sums = (a + b for a, b in zip(before, times, strict=True))
            kinds[kind] = KindTimes(kind, past.count + 1, *sums)
        return list(kinds.values())

    def _times(self) -> Iterator[tuple[str, float, float, float]]:
        last = self.measured.last
        predicted, measured = self.simulated.costs, last.timing.costs
        for number, instruction in enumerate(self.program.instructions):
            wait = last.timing.starts[number] - last.begins[number]
            yield instruction.name, predicted[number], measured[number], wait

    def write(self, file: TextIO) -> None:
        """Write a Perfetto trace: the simulated step, and the last measured one."""
        timeline = Timeline(self.program, self.simulated)
        write_trace(timeline, self.title, file, self.measured.last)

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": len(self.measured.steps),
            "predicted_us": round(self.simulated.makespan, 3),
            "measured_us": round(self.measured.step_us, 3),
            "ratio": round(self.ratio, 4),
            "kinds": [
                {
                    name: round(value, 3) if isinstance(value, float) else value
                    for name, value in asdict(row).items()
                }
                for row in self.kinds
            ],
        }

    def table(self) -> str:
        """Format the times of the instructions by kind, and those of the whole step."""
        from rich.table import Table

        table = Table(title="µs, predicted and measured", title_justify="left")
        table.add_column("kind", min_width=20)
        for column in ("count", "predicted", "measured", "ratio", "waited"):
            table.add_column(column, justify="right")
        for row in self.kinds:
            times = _cells(row.predicted_us, row.measured_us)
            table.add_row(row.kind, f"{row.count:,}", *times, f"{row.wait_us:,.1f}")
        table.add_section()
        table.add_row("step", "", *_cells(self.simulated.makespan, self.measured.step_us), "")
        return table_text(table)


def _cells(predicted: float, measured: float) -> tuple[str, str, str]:
    ratio = f"{predicted / measured:.2f}" if measured else ""
    return f"{predicted:,.1f}", f"{measured:,.1f}", ratio


def step_trace(title: str, measured: MeasuredSteps, target: Target, context: int) -> StepTrace:
    """Return the trace of measured steps whose sequences had `context` tokens."""
    return StepTrace(title, timing_at(measured.program, target, context), measured)
