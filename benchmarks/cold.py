"""`python -m benchmarks cold`: whole commands in fresh interpreters, beside the imports they need.

Each round runs the imports of torch.export and of the model class, `tpcompile plan` and `tpcompile
schedule` one after another, and every other round in reverse. Times are compared within a round.
With `--against PYTHON`, an interpreter that imports another version of tpcompile, that version's
commands run in the same rounds. The modules of both versions have bytecode, like those of a package
that is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.counts import positive
from benchmarks.report import spread, write_json

ROOT = Path(__file__).parents[1]
IMPORTS = "import torch.export; from transformers import Qwen2ForCausalLM"
MOST_OVER_IMPORTS = 1.5
"""The seconds that `plan` may take in addition to the imports."""
MOST_OF_OTHER = 0.6
"""The part of the other version's time that `schedule` may take."""
EXTRAS = ("accelerate", "datasets", "matplotlib", "pandas", "peft", "ray", "scipy", "sklearn")
"""Packages that no command needs. Transformers imports some of them if they are installed."""
_COMPILE = "import compileall, tpcompile; compileall.compile_dir(tpcompile.__path__[0], quiet=1)"
_COMMAND = "from tpcompile.cli import main; main()"
_MODULES = """
import contextlib, json, os, sys
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    {work}
print(json.dumps(sorted(sys.modules)))
"""


@dataclass(frozen=True)
class Spent:
    """The time of one process."""

    wall: float
    cpu: float
    """User and system time."""


@dataclass(frozen=True)
class Measured:
    """The times of each side, round by round, and the modules that each command imports."""

    sides: Mapping[str, Sequence[Spent]]
    modules: Mapping[str, Sequence[str]]
    """The modules of other packages that the imports and each command load."""

    def over_imports(self) -> float:
        """Return the median time of `plan` in addition to that of the imports in its round."""
        pairs = zip(self.sides["plan"], self.sides["imports"], strict=True)
        return median(plan.wall - imports.wall for plan, imports in pairs)

    def of_other(self) -> float | None:
        """Return the median ratio of `schedule` to the other version in its round, if there is one.

        The ratio of their processor times is the better one on a busy machine.
        """
        if "other schedule" not in self.sides:
            return None
        pairs = zip(self.sides["schedule"], self.sides["other schedule"], strict=True)
        return median(run.wall / other.wall for run, other in pairs)

    def extras(self) -> list[str]:
        """Return the packages in `EXTRAS` that commands load."""
        loaded = (modules for name, modules in self.modules.items() if name != "imports")
        packages = {name.partition(".")[0] for modules in loaded for name in modules}
        return sorted(packages.intersection(EXTRAS))

    @property
    def beyond(self) -> dict[str, list[str]]:
        """By command, the modules that the imports alone do not load."""
        return {
            name: [module for module in modules if module not in self.modules["imports"]]
            for name, modules in self.modules.items()
            if name != "imports"
        }

    @property
    def ok(self) -> bool:
        other = self.of_other()
        fast = self.over_imports() <= MOST_OVER_IMPORTS and (other or 0.0) <= MOST_OF_OTHER
        return fast and not self.extras()


def commands(preset: str, tp: int, target: str) -> dict[str, list[str]]:
    """Return the arguments of tpcompile for each command."""
    model = [f"preset:{preset}", "--tp", str(tp)]
    return {"plan": ["plan", *model], "schedule": ["schedule", *model, "--target", target]}


def spent(argv: Sequence[str]) -> Spent:
    """Run a process to its end, and return its time. Raise if it fails."""
    started = time.perf_counter()
    child = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, argv)
    return Spent(time.perf_counter() - started, usage.ru_utime + usage.ru_stime)


def modules_after(work: str, argv: Sequence[str] = ()) -> list[str]:
    """Return the modules of other packages that a fresh interpreter has loaded after a statement.

    `argv` is its command line.
    """
    command = [sys.executable, "-c", _MODULES.format(work=work), *argv]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    loaded: list[str] = json.loads(done.stdout)
    return [name for name in loaded if name.partition(".")[0] != "tpcompile"]


def measure(
    command_lines: Mapping[str, Sequence[str]], against: str | None, rounds: int, progress: Console
) -> Measured:
    """Run all sides in every round, in alternating order."""
    spent([sys.executable, "-c", _COMPILE])
    sides: dict[str, list[str]] = {"imports": [sys.executable, "-c", IMPORTS]}
    sides |= {
        name: [sys.executable, "-m", "tpcompile", *argv] for name, argv in command_lines.items()
    }
    if against is not None:
        # -P, because the working directory has this version
        spent([against, "-P", "-c", _COMPILE])
        other = [against, "-P", "-m", "tpcompile"]
        sides |= {f"other {name}": [*other, *argv] for name, argv in command_lines.items()}
    runs: dict[str, list[Spent]] = {name: [] for name in sides}
    for number in track(range(rounds), "rounds", console=progress):
        for name in sides if number % 2 == 0 else reversed(sides):
            runs[name].append(spent(sides[name]))
    modules = {"imports": modules_after(IMPORTS)}
    modules |= {name: modules_after(_COMMAND, argv) for name, argv in command_lines.items()}
    return Measured(runs, modules)


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a target is missed, otherwise 0."""
    parser = argparse.ArgumentParser("python -m benchmarks cold", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--preset", default="qwen2.5-72b")
    parser.add_argument("--tp", type=positive, default=8)
    parser.add_argument("--target", default="h200", help="the target of the schedule")
    parser.add_argument("--against", metavar="PYTHON", help="an interpreter with another version")
    options = parser.parse_args(arguments)
    command_lines = commands(options.preset, options.tp, options.target)
    measured = measure(command_lines, options.against, options.rounds, Console(stderr=True))
    if options.json:
        write_json(_json(measured))
    else:
        _print(measured)
    return 0 if measured.ok else 1


def _json(measured: Measured) -> dict[str, Any]:
    return {
        "ok": measured.ok,
        "over_imports_s": measured.over_imports(),
        "of_other": measured.of_other(),
        "extras": measured.extras(),
        "sides": {name: [asdict(run) for run in runs] for name, runs in measured.sides.items()},
        "beyond": measured.beyond,
    }


def _print(measured: Measured) -> None:
    console = Console(width=110, highlight=False)
    table = Table(title="Cold commands in seconds, median (min to max)")
    for column in ("", "wall", "processor"):
        table.add_column(column, justify="right" if column else "left")
    for name, runs in measured.sides.items():
        table.add_row(name, spread([run.wall for run in runs]), spread([run.cpu for run in runs]))
    console.print(table)
    for name, modules in measured.beyond.items():
        packages = dict.fromkeys(module.partition(".")[0] for module in modules)
        console.print(f"{name} imports in addition: {', '.join(packages)}")
    console.print(
        f"plan over imports: {measured.over_imports():.2f} s, at most {MOST_OVER_IMPORTS:g} s; "
        f"extras: {', '.join(measured.extras()) or 'none'}"
    )
    other = measured.of_other()
    if other is not None:
        console.print(f"schedule over the other version: {other:.2f}, at most {MOST_OF_OTHER:g}")
