"""`python -m benchmarks load`: peak memory per rank and time compared with Hugging Face.

Each run starts a side from scratch, from the first import to a decode step after a short prompt,
and samples its processes from outside. benchmarks/memory.py defines the memory that counts. The
sides run in turn. With --weights, native models also load in few bits: made while they load, and
from a checkpoint that `tpcompile quantize` writes. The memory of these ranks is measured above that
of an idle rank, which has a tiny model, and another table has the rate of loading. On a CPU without
AMX the modules of tpcompile hold a tied head twice in bf16, in the order of rows and in that of
matrix kernels; with the native backend they hold it once.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import RandomCheckpoint, random_checkpoint
from benchmarks.counts import positive
from benchmarks.load_rate import Rate, files_of, measure_rate, rate_table
from benchmarks.memory import MemoryWatch
from benchmarks.peers.side import Side, SideError, SideSpec
from benchmarks.report import write_json
from tpcompile.dtypes import HEADS
from tpcompile.errors import UsageError
from tpcompile.options import scheme_of
from tpcompile.quantizing import quantize

MODELS = ("qwen3-0.6b", "qwen3-1.7b")
"""Checkpoints of 1.2 and 3.4 GB."""
RANKS = (1, 2, 4)
PROMPT = list(range(1, 9))
WEIGHTS_FACTOR = 1.05
BASE_BYTES = 200 * 1000**2
"""Allowance for the interpreter, torch and buffers."""
FEW_BITS_BYTES = 250 * 1000**2
"""Allowance for buffers, above an idle rank, if weights have few bits."""
IDLE = "tiny-qwen3"
"""The model of an idle rank."""


@dataclass(frozen=True)
class Run:
    """A single start of one side, with its time and peak memory."""

    seconds: float
    """Time until the model can be called, imports included."""
    peaks: tuple[int, ...]
    """Peak bytes of each rank."""
    others: int
    """Total peak bytes of the other processes: the caller and a launcher."""


@dataclass
class Case:
    """A side with one checkpoint, and its memory limit."""

    model: str
    side: str
    tp: int
    weight_bytes: int
    limit: int | None
    """None for peers, which are measured without a limit."""
    runs: list[Run] = field(default_factory=list)
    missing: str = ""
    idle: int = 0
    """The peak of an idle rank, which is subtracted; 0 if whole processes are limited."""

    @property
    def peak(self) -> int:
        """The largest peak of any rank in any run."""
        return max(max(run.peaks) for run in self.runs) - self.idle

    @property
    def ok(self) -> bool:
        return not self.missing and (self.limit is None or self.peak <= self.limit)


def limit(checkpoint: RandomCheckpoint, tp: int) -> int:
    """Return the memory limit of a rank in bytes."""
    share = checkpoint.weight_bytes / tp * WEIGHTS_FACTOR
    return int(share) + checkpoint.largest_slice(tp) + BASE_BYTES


def run_once(spec: SideSpec, checkpoint: RandomCheckpoint) -> Run:
    """Start a side, let it load the model, run a prompt and a decode step, and end it."""
    with Side(spec, checkpoint.directory) as side, MemoryWatch(side.pid) as watch:
        ranks = side.ready()
        seconds = time.perf_counter() - side.started
        side.ask("prefill", [PROMPT], len(PROMPT) + 1)
        side.ask("decode", [[PROMPT[0]]])
    if len(ranks) != spec.tp or not watch.peaks.keys() >= set(ranks):
        raise SideError(
            f"{spec.name} must report {spec.tp} sampled processes as ranks, got {ranks}"
        )
    other_bytes = sum(peak for pid, peak in watch.peaks.items() if pid not in ranks)
    return Run(seconds, tuple(watch.peaks[pid] for pid in ranks), other_bytes)


def measure_model(
    model: str, ranks: Sequence[int], runs: int, threads: int, progress: Console
) -> list[Case]:
    """Measure all sides with one checkpoint, in turn."""
    progress.print(f"writing random weights of {model}")
    with random_checkpoint(model) as checkpoint:
        cases: list[tuple[SideSpec, Case]] = []
        for tp in ranks:
            peer = SideSpec("Hugging Face eager", "eager", 1, threads)
            if tp > 1:
                peer = SideSpec(f"Hugging Face TP, {tp} ranks", "hugging-face-tp", tp, 1)
            modules = SideSpec(f"tpcompile tp={tp}", "tpcompile", tp, threads)
            native = SideSpec(f"tpcompile native tp={tp}", "tpcompile-native", tp, threads)
            rank_limit = limit(checkpoint, tp)
            for spec, most in ((peer, None), (modules, rank_limit), (native, rank_limit)):
                cases.append((spec, Case(model, spec.name, tp, checkpoint.weight_bytes, most)))
        for number in range(runs):
            for spec, case in cases:
                progress.print(f"{model}, {spec.name}: run {number + 1} of {runs}")
                _run(spec, case, checkpoint)
    return [case for _, case in cases]


@dataclass(frozen=True)
class FewBits:
    """A format of weights, as of `tpcompile.compile`."""

    weights: str
    head: str | None = None


def measure_few_bits(
    model: str,
    wide: RandomCheckpoint,
    few: FewBits,
    ranks: Sequence[int],
    runs: int,
    threads: int,
    progress: Console,
) -> tuple[list[Case], list[Rate]]:
    """Measure native models in few bits, made while they load and from a checkpoint of them."""
    with tempfile.TemporaryDirectory() as directory:
        progress.print(f"quantizing {model} to {few.weights}")
        quantized = Path(directory) / "made"
        quantize(str(wide.directory), few.weights, quantized, head=few.head)
        narrow = replace(wide, directory=quantized, weight_bytes=_bytes_of(quantized))
        cases = list(_few_bits_cases(model, few, ranks, threads, wide, narrow, progress))
        for number in range(runs):
            for spec, case, checkpoint in cases:
                progress.print(f"{model}, {case.side}: run {number + 1} of {runs}")
                _run(spec, case, checkpoint)
        progress.print(f"{model}, {few.weights}: rates")
        rates = [
            measure_rate(model, _while_loading(few), wide.directory, few.weights, few.head, runs),
            measure_rate(model, _written(few), quantized, "", None, runs),
        ]
    return [case for _, case, _ in cases], rates


def _few_bits_cases(
    model: str,
    few: FewBits,
    ranks: Sequence[int],
    threads: int,
    wide: RandomCheckpoint,
    narrow: RandomCheckpoint,
    progress: Console,
) -> Iterator[tuple[SideSpec, Case, RandomCheckpoint]]:
    for tp in ranks:
        plain = SideSpec(f"tpcompile native tp={tp}", "tpcompile-native", tp, threads)
        progress.print(f"an idle rank of {tp}")
        with random_checkpoint(IDLE) as tiny:
            idle = max(run_once(plain, tiny).peaks)
        most = int(narrow.weight_bytes / tp * WEIGHTS_FACTOR) + FEW_BITS_BYTES
        quantizing = replace(plain, weights=few.weights, head=few.head)
        for spec, source, name in (
            (quantizing, wide, _while_loading(few)),
            (plain, narrow, _written(few)),
        ):
            side = f"{plain.name}, {name}"
            yield spec, Case(model, side, tp, narrow.weight_bytes, most, idle=idle), source


def _while_loading(few: FewBits) -> str:
    return f"made {few.weights}"


def _written(few: FewBits) -> str:
    return f"read {few.weights}"


def _bytes_of(directory: Path) -> int:
    """Return the bytes of the tensors of a checkpoint."""
    total = 0
    for path in files_of(directory):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total


def _run(spec: SideSpec, case: Case, checkpoint: RandomCheckpoint) -> None:
    if case.missing:
        return
    try:
        case.runs.append(run_once(spec, checkpoint))
    except SideError as error:
        case.missing = str(error)


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a rank exceeds its limit or a side is missing."""
    parser = argparse.ArgumentParser("python -m benchmarks load", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--models", nargs="+", default=list(MODELS), metavar="PRESET", help="models to load")
    add("--ranks", type=positive, nargs="+", default=list(RANKS), help="numbers of ranks, in turn")
    add("--runs", type=positive, default=3, help="number of starts of each side")
    add(
        "--threads",
        type=positive,
        default=os.cpu_count() or 1,
        help="total threads of eager and of tpcompile; Hugging Face TP has one per rank",
    )
    help = "formats of weights to measure too, as of `tpcompile.compile`, such as int8 int4:64"
    add("--weights", nargs="+", default=[], metavar="FORMAT", help=help)
    add("--head", choices=HEADS, help="what the head becomes in these formats; default: int8")
    add("--few-bits-only", action="store_true", help="measure only these formats")
    options = parser.parse_args(arguments)
    try:
        for weights in options.weights or [None]:
            scheme_of(weights, options.head)
    except UsageError as error:
        parser.error(str(error))
    progress = Console(stderr=True)
    models = [] if options.few_bits_only else options.models
    cases = [
        case
        for model in models
        for case in measure_model(model, options.ranks, options.runs, options.threads, progress)
    ]
    rates: list[Rate] = []
    formats = [FewBits(weights, options.head) for weights in options.weights]
    resources = options.ranks, options.runs, options.threads
    for model in options.models if formats else []:
        progress.print(f"writing random weights of {model}")
        with random_checkpoint(model) as wide:
            for few in formats:
                measured = measure_few_bits(model, wide, few, *resources, progress)
                cases += measured[0]
                rates += measured[1]
    ok = all(case.ok for case in cases)
    if options.json:
        written = [rate.to_json() for rate in rates]
        write_json({"ok": ok, "cases": [_json(case) for case in cases], "rates": written})
    else:
        console = Console(width=110, highlight=False)
        _show(cases, options.runs, console)
        if rates:
            console.print(rate_table(rates))
    return 0 if ok else 1


def _json(case: Case) -> dict[str, Any]:
    return {**asdict(case), "peak": case.peak if case.runs else None, "ok": case.ok}


def _show(cases: Sequence[Case], runs: int, console: Console) -> None:
    table = Table(title=f"Loading: peak MB of {runs} runs, median seconds")
    for name in ("model", "side"):
        table.add_column(name)
    for name in ("weights / ranks", "peak of each rank", "at most", "", "others", "seconds"):
        table.add_column(name, justify="right")
    for case in cases:
        table.add_row(*_cells(case))
    console.print(table)
    console.print(
        f"at most = weights / ranks × {WEIGHTS_FACTOR} + largest slice + {_mb(BASE_BYTES)} MB; "
        "others = the processes that are not ranks.\nAnonymous and shared memory; pages of mapped "
        "files are not counted. Seconds are from start to ready, imports included.\n"
        "Sides in few bits: peaks are those above an idle rank, and at most = weights / ranks × "
        f"{WEIGHTS_FACTOR} + {_mb(FEW_BITS_BYTES)} MB; made = while loading, read = from a "
        "checkpoint in few bits."
    )
    for case in cases:
        if case.missing:
            console.print(f"{case.model}, {case.side} is missing: {case.missing}", markup=False)


def _cells(case: Case) -> list[str]:
    share = _mb(case.weight_bytes // case.tp)
    if case.missing:
        return [case.model, case.side, share, "missing"]
    peaks = [max(run.peaks[rank] for run in case.runs) - case.idle for rank in range(case.tp)]
    verdict = "" if case.limit is None else "met" if case.ok else "MISSED"
    return [
        case.model,
        case.side,
        share,
        " ".join(_mb(peak) for peak in peaks),
        "" if case.limit is None else _mb(case.limit),
        verdict,
        _mb(max(run.others for run in case.runs)),
        f"{median(run.seconds for run in case.runs):.1f}",
    ]


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f}"
