"""`python -m benchmarks schedule`: the time to lower, schedule and verify a decode step.

Each case runs several times, in a fresh interpreter on one thread. Capture and the passes are
shown but not counted, because `compile-time` measures them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.counts import positive
from benchmarks.report import spread, write_json

TARGET = "h200"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """A model on some ranks of the target, with all of its layers or only the first ones."""

    preset: str
    tp: int
    layers: int
    most_seconds: float | None = None
    most_verify: float | None = None

    @property
    def name(self) -> str:
        return f"{self.preset} tp={self.tp}, {self.layers} layers"


CASES = (
    Case("qwen3-8b", 1, 9),
    Case("qwen3-8b", 1, 18),
    Case("qwen3-8b", 1, 36, most_seconds=4.0, most_verify=2.0),
    Case("qwen2.5-72b", 8, 80, most_seconds=15.0),
)
FEW, MANY = CASES[0], CASES[2]
"""The cases between which growth is measured."""

MOST_GROWTH = 1.1
"""Limit of the time per layer of MANY over that of FEW. Linear is 1, and clocks are not exact."""


@dataclass(frozen=True)
class Run:
    """Seconds of one cold run, the size of its result, and its peak memory."""

    capture: float
    passes: float
    lower: float
    dependencies: float
    schedule: float
    counters: float
    verify: float
    values: float
    """The proof that the program computes the graph, to which no target applies yet."""
    instructions: int
    counter_count: int
    """The number of counters of the program."""
    faults: int
    peak_bytes: int

    @property
    def all(self) -> float:
        """The seconds to which the targets apply."""
        return self.lower + self.dependencies + self.schedule + self.counters + self.verify


COUNTED = ("lower", "dependencies", "schedule", "counters", "verify", "values", "all")


def run_cold(preset: str, tp: int, layers: int, policy: str, target: str = TARGET) -> Run:
    """Schedule once in this process."""
    import torch
    from transformers import AutoConfig

    from tpcompile import presets
    from tpcompile.frontend import capture
    from tpcompile.passes import run_passes
    from tpcompile.passes.pipeline import decode_pipeline
    from tpcompile.vm.lowering import StepPlan
    from tpcompile.vm.schedule.scheduled import scheduled
    from tpcompile.vm.targets import target_of

    torch.set_num_threads(1)
    machine = target_of(target)
    config = AutoConfig.for_model(**{**presets.preset(preset), "num_hidden_layers": layers})
    clock = [time.perf_counter()]
    captured = capture(config)
    clock.append(time.perf_counter())
    graph, _ = run_passes(captured.graph, decode_pipeline(tp, machine.spans))
    clock.append(time.perf_counter())
    schedule = scheduled(graph, machine, StepPlan.on(machine), policy)
    return Run(
        capture=clock[1] - clock[0],
        passes=clock[2] - clock[1],
        **schedule.seconds,
        instructions=len(schedule.program.instructions),
        counter_count=schedule.program.counters,
        faults=len(schedule.faults),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _run_apart(case: Case, policy: str) -> Run:
    child = [case.preset, str(case.tp), str(case.layers)]
    command = [sys.executable, "-m", "benchmarks", "schedule", "--policy", policy]
    done = subprocess.run(
        [*command, "--child", *child], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return Run(**json.loads(done.stdout))


@dataclass(frozen=True)
class Measured:
    """All measurements, by case."""

    policy: str
    cases: dict[Case, list[Run]]

    def median(self, case: Case, column: str) -> float:
        value: float = median(getattr(run, column) for run in self.cases[case])
        return value

    @property
    def growth(self) -> float:
        few, many = (self.median(case, "all") / case.layers for case in (FEW, MANY))
        return many / few

    def targets(self) -> Iterator[tuple[str, float, float, str]]:
        """Yield the name, the measured value, the limit and the unit of each target."""
        for case, runs in self.cases.items():
            if case.most_seconds is not None:
                yield f"{case.name}: all", self.median(case, "all"), case.most_seconds, "s"
            if case.most_verify is not None:
                yield f"{case.name}: verify", self.median(case, "verify"), case.most_verify, "s"
            yield f"{case.name}: faults", max(run.faults for run in runs), 0, ""
        layers = f"{MANY.layers} layers over {FEW.layers}"
        yield f"time per layer, {layers}", self.growth, MOST_GROWTH, "×"

    @property
    def ok(self) -> bool:
        return all(value <= allowed for _, value, allowed, _ in self.targets())


def measure(runs: int, policy: str, progress: Console) -> Measured:
    """Run the cases in turn, so that a slow minute of the machine affects all of them."""
    cases: dict[Case, list[Run]] = {case: [] for case in CASES}
    for _ in track(range(runs), "cold runs", console=progress):
        for case, case_runs in cases.items():
            case_runs.append(_run_apart(case, policy))
    return Measured(policy, cases)


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a target is missed, otherwise 0."""
    from tpcompile.vm.schedule.policies import DEFAULT_POLICY, POLICIES

    parser = argparse.ArgumentParser("python -m benchmarks schedule", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--runs", type=positive, default=5, help="number of cold runs of each case")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=DEFAULT_POLICY,
        help="how instructions are assigned to workers and ordered",
    )
    parser.add_argument(
        "--child",
        nargs=3,
        metavar=("PRESET", "TP", "LAYERS"),
        help="run once in this process, print JSON",
    )
    options = parser.parse_args(arguments)
    if options.child:
        preset, tp, layers = options.child
        write_json(asdict(run_cold(preset, int(tp), int(layers), options.policy)))
        return 0
    measured = measure(options.runs, options.policy, Console(stderr=True))
    if options.json:
        write_json(_json(measured))
    else:
        _print(measured)
    return 0 if measured.ok else 1


def _json(measured: Measured) -> dict[str, Any]:
    return {
        "ok": measured.ok,
        "target": TARGET,
        "policy": measured.policy,
        "cases": {
            case.name: [{**asdict(run), "all": run.all} for run in runs]
            for case, runs in measured.cases.items()
        },
        "targets": [
            {"what": subject, "measured": value, "most": most, "unit": unit, "ok": value <= most}
            for subject, value, most, unit in measured.targets()
        ],
    }


def _print(measured: Measured) -> None:
    console = Console(width=130, highlight=False)
    console.print(_table(measured))
    console.print("all = lower to verify, without capture and passes.\n")
    for subject, value, most, unit in measured.targets():
        verdict = "met" if value <= most else "MISSED"
        console.print(f"{subject}: {value:.2f} {unit}, at most {most:g} {unit}: {verdict}")


def _table(measured: Measured) -> Table:
    runs = max(map(len, measured.cases.values()))
    table = Table(
        title=f"Schedules for {TARGET}, {measured.policy}, one thread: seconds, median "
        f"(min to max) of {runs} cold runs"
    )
    table.add_column("")
    for case in measured.cases:
        table.add_column(case.name, justify="right")
    every = list(measured.cases.values())
    for column in ("capture", "passes", *COUNTED):
        table.add_row(
            column, *(spread([getattr(run, column) for run in case_runs]) for case_runs in every)
        )
        if column == "passes":
            table.add_section()
    table.add_section()
    table.add_row("instructions", *(f"{case_runs[0].instructions:,}" for case_runs in every))
    table.add_row("counters", *(f"{case_runs[0].counter_count:,}" for case_runs in every))
    table.add_row(
        "peak memory",
        *(f"{max(r.peak_bytes for r in case_runs) / 1e9:.2f} GB" for case_runs in every),
    )
    return table
