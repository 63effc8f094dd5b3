"""The rate at which a rank reads a checkpoint, as a share of reading its files."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from tpcompile.backends.native import Native
from tpcompile.backends.rotation import CPU
from tpcompile.frontend import capture
from tpcompile.huge_pages import zeros
from tpcompile.options import scheme_of
from tpcompile.passes import default_pipeline, run_passes
from tpcompile.runtime.ranks.parameters import evaluate_all
from tpcompile.runtime.ranks.rank import rank_modules
from tpcompile.runtime.weights import opened, weights_of

_BUFFER = 1 << 24


@dataclass
class Rate:
    """The seconds in which one rank loads all weights of a checkpoint, and those of its files."""

    model: str
    source: str
    bytes: int
    """The bytes of the files."""
    loading: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    """The seconds in which a loop reads the files into new memory, before each load."""
    passing: list[float] = field(default_factory=list)
    """The same into a buffer of 16 MB, which it overwrites: nothing is kept."""

    @property
    def share(self) -> float:
        """The rate of loading as a share of that of reading into new memory."""
        return median(self.reading) / median(self.loading)

    @property
    def share_of_passing(self) -> float:
        """The rate of loading as a share of that of reading into a buffer."""
        return median(self.passing) / median(self.loading)

    def to_json(self) -> dict[str, Any]:
        rate = self.bytes / median(self.loading)
        shares = {"share_of_read": self.share, "share_of_passing": self.share_of_passing}
        return {**asdict(self), "bytes_per_second": rate, **shares}


def files_of(directory: Path) -> list[Path]:
    """Return the files with the weights of a checkpoint."""
    return sorted(directory.glob("*.safetensors"))


def measure_rate(
    model: str, source: str, directory: Path, weights: str, head: str | None, runs: int
) -> Rate:
    """Read the files and load the weights in turn, as the rank of a native model does.

    The first turn is not measured: it brings the files into the memory of the system.
    """
    captured = capture(str(directory), scheme=scheme_of(weights or None, head))
    graph, _ = run_passes(captured.graph, default_pipeline(1))
    (module,) = rank_modules(graph, Native)
    stored = weights_of(captured, str(directory), None)
    files = files_of(directory)
    rate = Rate(model, source, sum(file.stat().st_size for file in files))
    for number in range(1 + runs):
        reading = _reading_seconds(files, zeros(rate.bytes))
        passing = _reading_seconds(files, bytearray(_BUFFER))
        begun = time.perf_counter()
        with opened(stored) as read:
            evaluate_all(module, read, lambda: None, CPU)
        loading = time.perf_counter() - begun
        if number:
            rate.reading.append(reading)
            rate.passing.append(passing)
            rate.loading.append(loading)
    return rate


def _reading_seconds(files: Sequence[Path], memory: mmap.mmap | bytearray) -> float:
    """Read the files into memory, block by block, and start again where it ends."""
    begun, place = time.perf_counter(), 0
    with memoryview(memory) as view:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while read := file.readinto(view[place : place + _BUFFER]):
                    place = (place + read) % len(view)
    return time.perf_counter() - begun


def rate_table(rates: Sequence[Rate]) -> Table:
    """Format the rates."""
    table = Table(title="Loading all weights on one rank: the rate of files in memory")
    for name in ("model", "checkpoint"):
        table.add_column(name)
    shares = "of reading into new memory", "into a buffer"
    for name in ("MB of files", "seconds", "GB/s", *shares):
        table.add_column(name, justify="right")
    for rate in rates:
        seconds = median(rate.loading)
        numbers = f"{rate.bytes / 1e6:,.0f}", f"{seconds:.2f}", f"{rate.bytes / 1e9 / seconds:.2f}"
        shares = f"{rate.share:.2f}", f"{rate.share_of_passing:.2f}"
        table.add_row(rate.model, rate.source, *numbers, *shares)
    return table
