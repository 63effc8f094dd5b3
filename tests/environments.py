"""Run the test suite with other CPU features, terminal widths, locales and system loads.

    python -m tests.environments                           # all environments in turn
    python -m tests.environments avx2 load                 # selected environments
    python -m tests.environments avx2 -- tests/backends -x # arguments for pytest

A separate process first verifies that the setting has an effect, since oneDNN silently ignores
unknown values. Settings that this machine does not support are reported as such.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_ONEDNN_ISA = """
import os
os.environ["ONEDNN_VERBOSE"] = "1"
import torch
torch.ones(4).to_mkldnn().relu()
"""
_ATEN_ISA = "import torch; print(torch.backends.cpu.get_cpu_capability())"
_COLUMNS = "import shutil; print('columns', shutil.get_terminal_size().columns)"
_LOCALE = "import locale; print('locale', locale.setlocale(locale.LC_CTYPE, ''))"


@dataclass(frozen=True)
class Environment:
    """Environment variables of a run, and a script that verifies their effect."""

    variables: dict[str, str] = field(default_factory=dict)
    probe: str = ""
    shows: str = ""
    needs: str = ""
    """A CPU flag that the setting requires."""
    busy: int = 0
    """The number of processes that load the machine during the run."""

    def possible(self) -> bool:
        return not self.needs or self.needs in _cpu_flags()

    def check(self) -> None:
        """Raise unless the setting is in effect."""
        if not self.probe:
            return
        done = subprocess.run(
            [sys.executable, "-c", self.probe],
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            check=True,
        )
        if self.shows not in done.stdout.splitlines():
            raise SystemExit(
                f"{self.variables} must show {self.shows!r}, got:\n{done.stdout}{done.stderr}"
            )


_ISA = "onednn_verbose,v1,info,cpu,isa:Intel "
ENVIRONMENTS = {
    "avx2": Environment({"ONEDNN_MAX_CPU_ISA": "AVX2"}, _ONEDNN_ISA, f"{_ISA}AVX2", "avx2"),
    "avx512-bf16": Environment(
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        _ONEDNN_ISA,
        f"{_ISA}AVX-512 with Intel DL Boost and bfloat16 support",
        "avx512_bf16",
    ),
    "aten-avx2": Environment({"ATEN_CPU_CAPABILITY": "avx2"}, _ATEN_ISA, "AVX2", "avx2"),
    "narrow": Environment({"COLUMNS": "60"}, _COLUMNS, "columns 60"),
    "wide": Environment({"COLUMNS": "200"}, _COLUMNS, "columns 200"),
    "c-locale": Environment({"LC_ALL": "C"}, _LOCALE, "locale C"),
    "load": Environment(busy=2),
}


@dataclass(frozen=True)
class Ran:
    """The result of a run of the suite."""

    status: int
    said: str
    wall_s: float
    cpu_s: float


def run(environment: Environment, arguments: Sequence[str]) -> Ran:
    """Run pytest in the environment and stream its output to the terminal."""
    environment.check()
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", *arguments]
    start, used, last_line = time.monotonic(), _cpu_s(), ""
    with _load(environment.busy):
        variables = {**os.environ, **environment.variables, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                last_line = line.strip() or last_line
        # The load processes are children too, but count only after they are waited for.
        cpu = _cpu_s() - used
    return Ran(process.returncode, last_line, time.monotonic() - start, cpu)


@contextmanager
def _load(busy: int) -> Iterator[None]:
    """Keep `busy` cores loaded until the run ends."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _cpu_s() -> float:
    """Return user and system CPU seconds of all child processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_flags() -> set[str]:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        line = next((line for line in file if line.startswith("flags")), "")
    return set(line.split())


def main(arguments: Sequence[str]) -> int:
    words, options = list(arguments), []
    if "--" in words:
        separator = words.index("--")
        words, options = words[:separator], words[separator + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tests.environments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENTS))
    names = parser.parse_args(words).names or list(ENVIRONMENTS)
    unknown = [name for name in names if name not in ENVIRONMENTS]
    if unknown:
        parser.error(f"{unknown[0]} must be one of {', '.join(ENVIRONMENTS)}")
    lines, failed = [], False
    for name in names:
        environment = ENVIRONMENTS[name]
        if not environment.possible():
            lines.append(f"{name:12} not possible here: this CPU has no {environment.needs}")
            continue
        ran = run(environment, options)
        failed |= ran.status != 0
        lines.append(f"{name:12} {ran.said} [{ran.wall_s:.0f} s, {ran.cpu_s:.0f} CPU s]")
    sys.stdout.write("\n".join(["", *lines, ""]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
