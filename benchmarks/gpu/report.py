"""The report of a run on a GPU: a table, JSON, and a record in the repository."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from benchmarks.gpu.checks import Check
from benchmarks.gpu.limits import Limits
from tpcompile.inspect.tables import table_text

RESULTS = Path(__file__).parent.parent / "results"
_WANTED_MS = {("qwen3-0.6b", 128): 0.48, ("qwen3-1.7b", 128): 1.05, ("qwen3-8b", 128): 4.1}
"""What a step of ours for one sequence may take on an H200."""
_PACKAGES = ("triton", "transformers", "tpcompile")


@dataclass(frozen=True)
class Row:
    """The times of one side for one shape."""

    model: str
    context: int
    batch: int
    side: str
    bytes: int
    """The bytes of weights and cache that a step must read."""
    ms: Sequence[float] = ()
    """The milliseconds per step of each burst."""
    error: str = ""
    """Why the side could not run."""


@dataclass
class Report:
    """All that a run has found."""

    device: str
    steps: int
    limits: Limits
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def ok(self) -> bool:
        """Whether all checks of numbers hold."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "when": self.when,
            "device": self.device,
            "python": platform.python_version(),
            # that of torch with its build, such as +cu130, which its metadata may leave out
            "versions": {"torch": torch.__version__} | {name: _version(name) for name in _PACKAGES},
            "steps_per_burst": self.steps,
            "gb_per_s": asdict(self.limits),
            "checks": [check.to_json() for check in self.checks],
            "rows": [asdict(row) | {"share": self._share(row)} for row in self.rows],
        }

    def text(self) -> str:
        """Format the checks and the times."""
        checks = Table(title=f"{self.device}: numbers", title_justify="left")
        for column in ("check", "found", ""):
            checks.add_column(column, overflow="fold")
        for check in self.checks:
            checks.add_row(check.name, check.found, "ok" if check.ok else "NO")
        limits = f"read {self.limits.read:,.0f} GB/s, copy {self.limits.copy:,.0f} GB/s"
        times = Table(title=f"ms per step ({limits})", title_justify="left")
        times.add_column("model", overflow="fold")
        for column in ("context", "batch"):
            times.add_column(column, justify="right", no_wrap=True)
        times.add_column("side", overflow="fold")
        for column in ("ms", "least", "limit", "wanted"):
            times.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            times.add_row(
                row.model, f"{row.context:,}", str(row.batch), row.side, *self._cells(row)
            )
        return table_text(checks, times) + "".join(
            f"{row.model}, {row.context:,}, batch {row.batch}: {row.side}: {row.error}\n"
            for row in self.rows
            if row.error
        )

    def record(self, directory: Path) -> Path:
        """Write the JSON to a new file, named after the date and the device."""
        directory.mkdir(parents=True, exist_ok=True)
        name = f"{self.when[:10]}-{self.device.lower().replace(' ', '-')}"
        place, number = directory / f"{name}.json", 2
        while place.exists():
            place, number = directory / f"{name}-{number}.json", number + 1
        place.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        return place

    def _share(self, row: Row) -> float | None:
        """Return the bandwidth of a side as a share of what the device can read."""
        if not row.ms:
            return None
        return round(row.bytes / median(row.ms) / 1e6 / self.limits.read, 4)

    def _cells(self, row: Row) -> tuple[str, str, str, str]:
        if row.error:
            return "failed", "", "", ""
        typical, wanted = median(row.ms), _WANTED_MS.get((row.model, row.context))
        ours = row.side == "tpcompile" and row.batch == 1
        target = "" if wanted is None or not ours else f"{wanted:.2f}"
        return f"{typical:.3f}", f"{min(row.ms):.3f}", f"{self._share(row):.0%}", target


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
