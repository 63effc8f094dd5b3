"""`python -m benchmarks explorer`: size of the explorer's page, and the time to make and use it.

The time of the page is the CPU time of all its parts, measured within one command. The same
capture, passes and schedule also run without a page, in alternation; the difference of the commands
should be close, but it varies by some percent of a command. The page is then opened in Chromium,
once per run in a new browser.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.counts import positive
from benchmarks.report import spread, write_json

TARGET = "h200"
ROOT = Path(__file__).parents[1]
FRAMES = 240
"""The frames of the scripted pan and zoom of the timeline."""

MOST_MAKE_SECONDS = 5.0
MOST_CHOOSE_MS = 150.0
MOST_FRAME_MS = 33.0


@dataclass(frozen=True)
class Case:
    """A model on some ranks of the target, and the limits of its page."""

    preset: str
    tp: int
    most_mb: float
    most_view_seconds: float

    @property
    def name(self) -> str:
        return f"{self.preset} tp={self.tp}"


CASES = (Case("qwen3-0.6b", 2, 4.0, 1.0), Case("qwen2.5-72b", 8, 16.0, 1.5))


@dataclass(frozen=True)
class Used:
    """Times of a page in the browser. Frames and choices are in ms."""

    view_seconds: float
    """From the start of the navigation until the first view is there."""
    schedule_seconds: float
    """From the click on the tab of the Schedule view until the timeline is there."""
    choices: dict[str, float]
    """From the click on each pass until the frame after the one that shows it."""
    frames: list[float]
    draws: list[float]
    totals_equal: bool
    """Whether the totals of every level of the timeline are those of the instructions."""


@dataclass(frozen=True)
class Run:
    """The page of one run: its size, the CPU seconds to make it, and its use."""

    parts: dict[str, float]
    """The recording of stages, the plan, the modules, the columns of the schedule, and writing."""
    explore: float
    """Everything: capture, passes, schedule and the page."""
    plain: float
    """The same capture, passes and schedule without a page."""
    mb: float
    instructions: int
    used: Used

    @property
    def make(self) -> float:
        """The seconds that the page costs."""
        return sum(self.parts.values())

    @property
    def frame_ms(self) -> float:
        """The 95th percentile of the time between frames."""
        return quantiles(self.used.frames, n=20)[-1]


def make_page(preset: str, tp: int, output: Path) -> tuple[float, dict[str, float]]:
    """Make the page in this process; return the CPU seconds of all, and of the page's parts."""
    from tpcompile.exploring import explore

    started = time.process_time()
    exploration = explore(f"preset:{preset}", tp, target=TARGET)
    exploration.write(output)
    return time.process_time() - started, exploration.seconds


def make_plain(preset: str, tp: int) -> tuple[float, int]:
    """Do the same without recording and without a page; return CPU seconds and instructions."""
    from tpcompile.frontend import capture
    from tpcompile.passes import default_pipeline, run_passes
    from tpcompile.passes.pipeline import DecodeFork
    from tpcompile.scheduling import choose
    from tpcompile.vm.schedule.scheduled import scheduled

    started = time.process_time()
    choices = choose(tp=tp, target=TARGET)
    passes = default_pipeline(tp)
    fork = DecodeFork(passes)
    run_passes(capture(f"preset:{preset}").graph, passes, [fork])
    graph = fork.run(choices.spans)
    step = scheduled(graph, choices.target, choices.plan, choices.policy)
    return time.process_time() - started, len(step.program.instructions)


def run_child(kind: str, preset: str, tp: int, output: Path) -> dict[str, Any]:
    """Run one side in this process, which has imported everything before the clock starts."""
    import torch

    import tpcompile.exploring  # noqa: F401  (both sides import the same)

    torch.set_num_threads(1)
    if kind == "page":
        seconds, parts = make_page(preset, tp, output)
        return {"seconds": seconds, "parts": parts}
    seconds, instructions = make_plain(preset, tp)
    return {"seconds": seconds, "instructions": instructions}


def _run_apart(kind: str, case: Case, output: Path) -> dict[str, Any]:
    child = [kind, case.preset, str(case.tp), str(output)]
    command = [sys.executable, "-m", "benchmarks", "explorer", "--child", *child]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def measure_case(case: Case, page_first: bool) -> Run:
    """Make a page and its plain side in turn, and use the page."""
    from benchmarks.explorer_page import use_page

    with tempfile.TemporaryDirectory() as home:
        output = Path(home) / "report.html"
        order = ("page", "plain") if page_first else ("plain", "page")
        sides = {kind: _run_apart(kind, case, output) for kind in order}
        return Run(
            parts=sides["page"]["parts"],
            explore=sides["page"]["seconds"],
            plain=sides["plain"]["seconds"],
            mb=output.stat().st_size / 1e6,
            instructions=sides["plain"]["instructions"],
            used=use_page(output, FRAMES),
        )


@dataclass(frozen=True)
class Measured:
    """All runs, by case."""

    cases: dict[Case, list[Run]]

    def targets(self) -> Iterator[tuple[str, float, float, str]]:
        """Yield the name, the measured value, the limit and the unit of each target."""
        for case, runs in self.cases.items():
            views = [run.used.view_seconds for run in runs]
            worst = [max(run.used.choices.values()) for run in runs]
            middle = [median(run.used.choices.values()) for run in runs]
            frames = [run.frame_ms for run in runs]
            wrong = sum(not run.used.totals_equal for run in runs)
            make = median(run.make for run in runs)
            yield f"{case.name}: page", max(run.mb for run in runs), case.most_mb, "MB"
            yield f"{case.name}: make the page", make, MOST_MAKE_SECONDS, "s"
            yield f"{case.name}: first view", median(views), case.most_view_seconds, "s"
            yield f"{case.name}: choose a pass, median", median(middle), MOST_CHOOSE_MS, "ms"
            yield f"{case.name}: choose a pass, worst", median(worst), MOST_CHOOSE_MS, "ms"
            yield f"{case.name}: frame, 95th percentile", median(frames), MOST_FRAME_MS, "ms"
            yield f"{case.name}: runs with wrong totals", wrong, 0, ""

    @property
    def ok(self) -> bool:
        return all(value <= allowed for _, value, allowed, _ in self.targets())


def measure(runs: int, cases: Sequence[Case], progress: Console) -> Measured:
    """Run the cases in turn, so that a slow minute of the machine affects all of them."""
    measured: dict[Case, list[Run]] = {case: [] for case in cases}
    for number in track(range(runs), "pages", console=progress):
        for case, case_runs in measured.items():
            case_runs.append(measure_case(case, page_first=number % 2 == 0))
    return Measured(measured)


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a target is missed, otherwise 0."""
    parser = argparse.ArgumentParser("python -m benchmarks explorer", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--runs", type=positive, default=3, help="number of pages of each case")
    parser.add_argument("--case", choices=[case.preset for case in CASES], help="one case only")
    parser.add_argument(
        "--child",
        nargs=4,
        metavar=("SIDE", "PRESET", "TP", "FILE"),
        help="run one side once in this process, print JSON",
    )
    options = parser.parse_args(arguments)
    if options.child:
        kind, preset, tp, file = options.child
        write_json(run_child(kind, preset, int(tp), Path(file)))
        return 0
    cases = [case for case in CASES if options.case in (None, case.preset)]
    measured = measure(options.runs, cases, Console(stderr=True))
    if options.json:
        write_json(_json(measured))
    else:
        _print(measured)
    return 0 if measured.ok else 1


def _json(measured: Measured) -> dict[str, Any]:
    return {
        "ok": measured.ok,
        "target": TARGET,
        "cases": {
            case.name: [asdict(run) | {"make": run.make, "frame_ms": run.frame_ms} for run in runs]
            for case, runs in measured.cases.items()
        },
        "targets": [
            {"what": subject, "measured": value, "most": most, "unit": unit, "ok": value <= most}
            for subject, value, most, unit in measured.targets()
        ],
    }


def _print(measured: Measured) -> None:
    console = Console(width=110, highlight=False)
    table = Table(title="The explorer's page: median (min to max)")
    table.add_column("")
    for case in measured.cases:
        table.add_column(case.name, justify="right")
    every = list(measured.cases.values())
    for name, values in (
        *(
            (f"{part}, CPU s", [[run.parts[part] for run in runs] for runs in every])
            for part in every[0][0].parts
        ),
        ("explore, CPU s", [[run.explore for run in runs] for runs in every]),
        ("without the page, CPU s", [[run.plain for run in runs] for runs in every]),
        ("difference, CPU s", [[run.explore - run.plain for run in runs] for runs in every]),
        ("first view, s", [[run.used.view_seconds for run in runs] for runs in every]),
        ("Schedule view, s", [[run.used.schedule_seconds for run in runs] for runs in every]),
        ("draw a frame, ms", [[median(run.used.draws) for run in runs] for runs in every]),
    ):
        table.add_row(name, *map(spread, values))
    table.add_row("instructions", *(f"{runs[0].instructions:,}" for runs in every))
    console.print(table)
    for subject, value, most, unit in measured.targets():
        verdict = "met" if value <= most else "MISSED"
        console.print(f"{subject}: {value:.2f} {unit}, at most {most:g} {unit}: {verdict}")
