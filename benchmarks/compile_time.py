"""`python -m benchmarks compile-time`: the time of a cold compilation and of its parts.

Each case runs several times, in a fresh interpreter. Imports, both at the start and lazy ones
during capture, are timed separately and not counted.
"""

from __future__ import annotations

import argparse
import builtins
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.counts import positive
from benchmarks.report import spread, write_json

CASES = (("qwen3-0.6b", 2), ("qwen2.5-72b", 8))
"""A small model, then a large model that is compared with it."""

MOST_SECONDS = 5.0
MOST_RATIO = 1.5
MOST_PROOF = 0.25
"""The most that the proof of every pass may take of the time of a compilation."""
MOST_BYTES = 2 * 1000**3
MOST_HELP_SECONDS = 0.5
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    """Seconds of the parts of one cold run, each without imports, and its peak memory."""

    capture: float
    passes: float
    check: float
    proof: float
    compile: float
    """Capture, passes, check and proof. The targets apply to this time."""
    emit: float
    imports: float
    wall: float
    """From the first import to the last emitted source, imports included."""
    peak_bytes: int


COLUMNS = ("capture", "passes", "check", "proof", "compile", "emit", "imports", "wall")


class ImportClock:
    """Clock that sums the time of all imports, lazy ones included."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        plain, depth = builtins.__import__, 0

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            started = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                depth -= 1
                if not depth:
                    self.seconds += time.perf_counter() - started

        builtins.__import__ = timed
        try:
            yield
        finally:
            builtins.__import__ = plain

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """Return the result of `work`, and its seconds without imports."""
        imports, started = self.seconds, time.perf_counter()
        value = work()
        return value, time.perf_counter() - started - (self.seconds - imports)


def run_cold(preset: str, tp: int) -> Run:
    """Compile once in this process. The run is cold only if nothing was imported before."""
    started = time.perf_counter()
    clock = ImportClock()
    with clock.running():
        from tpcompile.backends.torch_tp import emit_sources
        from tpcompile.frontend import capture
        from tpcompile.passes import default_pipeline, run_passes

        captured, capturing = clock.timed(lambda: capture(f"preset:{preset}"))
        (gm, stages), lowering = clock.timed(
            lambda: run_passes(captured.graph, default_pipeline(tp))
        )
        _, emitting = clock.timed(lambda: emit_sources(gm))
    checking = sum(stage.stats.check_ms for stage in stages) / 1e3
    proving = sum(stage.stats.proof_ms for stage in stages) / 1e3
    return Run(
        capture=capturing,
        passes=lowering - checking - proving,
        check=checking,
        proof=proving,
        compile=capturing + lowering,
        emit=emitting,
        imports=clock.seconds,
        wall=time.perf_counter() - started,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _run_apart(preset: str, tp: int) -> Run:
    command = [sys.executable, "-m", "benchmarks", "compile-time", "--child", preset, str(tp)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return Run(**json.loads(done.stdout))


def _help_seconds() -> float:
    command = [sys.executable, "-m", "tpcompile", "--help"]
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


@dataclass(frozen=True)
class Measured:
    """The runs of each case, and the times of `tpcompile --help`."""

    cases: dict[str, list[Run]]
    help_seconds: list[float]

    def medians(self, column: str) -> list[float]:
        return [median(getattr(run, column) for run in runs) for runs in self.cases.values()]

    @property
    def ratio(self) -> float:
        small, large = self.medians("compile")
        return large / small

    @property
    def peak_bytes(self) -> int:
        return max(run.peak_bytes for runs in self.cases.values() for run in runs)

    def targets(self) -> list[tuple[str, float, float, str]]:
        """Return the name, the measured value, the limit and the unit of each target."""
        small, large = (name for name in self.cases)
        proofs = [
            (f"{name}: proof over compile", proof / compiled, MOST_PROOF, "×")
            for name, proof, compiled in zip(
                self.cases, self.medians("proof"), self.medians("compile"), strict=True
            )
        ]
        return [
            *proofs,
            (f"{small}: compile", self.medians("compile")[0], MOST_SECONDS, "s"),
            (f"{large} over {small}", self.ratio, MOST_RATIO, "×"),
            ("peak memory", self.peak_bytes / 1e9, MOST_BYTES / 1e9, "GB"),
            ("tpcompile --help", median(self.help_seconds), MOST_HELP_SECONDS, "s"),
        ]

    @property
    def ok(self) -> bool:
        return all(value <= allowed for _, value, allowed, _ in self.targets())


def measure(runs: int, progress: Console) -> Measured:
    """Run the cases in turn, so that a slow minute of the machine affects both."""
    cases: dict[str, list[Run]] = {f"{preset} tp={tp}": [] for preset, tp in CASES}
    for _ in track(range(runs), "cold runs", console=progress):
        for (preset, tp), case_runs in zip(CASES, cases.values(), strict=True):
            case_runs.append(_run_apart(preset, tp))
    return Measured(cases, [_help_seconds() for _ in range(runs)])


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a target is missed, otherwise 0."""
    parser = argparse.ArgumentParser("python -m benchmarks compile-time", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--runs", type=positive, default=5, help="number of cold runs of each case")
    parser.add_argument(
        "--child", nargs=2, metavar=("PRESET", "TP"), help="run once in this process, print JSON"
    )
    options = parser.parse_args(arguments)
    if options.child:
        preset, tp = options.child
        write_json(asdict(run_cold(preset, int(tp))))
        return 0
    measured = measure(options.runs, Console(stderr=True))
    if options.json:
        write_json(_json(measured))
    else:
        _print(measured)
    return 0 if measured.ok else 1


def _json(measured: Measured) -> dict[str, Any]:
    return {
        "ok": measured.ok,
        "cases": {name: [asdict(run) for run in runs] for name, runs in measured.cases.items()},
        "help_seconds": measured.help_seconds,
        "targets": [
            {"what": subject, "measured": value, "most": most, "unit": unit, "ok": value <= most}
            for subject, value, most, unit in measured.targets()
        ],
    }


def _print(measured: Measured) -> None:
    console = Console(width=110, highlight=False)
    runs = len(measured.help_seconds)
    table = Table(title=f"Cold compilation in seconds, median (min to max) of {runs} runs")
    table.add_column("")
    for name in measured.cases:
        table.add_column(name, justify="right")
    for column in COLUMNS:
        table.add_row(
            column,
            *(
                spread([getattr(r, column) for r in case_runs])
                for case_runs in measured.cases.values()
            ),
        )
    peaks = (
        max(run.peak_bytes for run in case_runs) / 1e9 for case_runs in measured.cases.values()
    )
    table.add_row("peak memory", *(f"{peak:.2f} GB" for peak in peaks))
    console.print(table)
    console.print("compile = capture + passes + check + proof, each without imports.\n")
    for subject, value, most, unit in measured.targets():
        verdict = "met" if value <= most else "MISSED"
        console.print(f"{subject}: {value:.2f} {unit}, at most {most:g} {unit}: {verdict}")
