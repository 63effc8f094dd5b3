"""`python -m benchmarks decode`: time per decode step, of tpcompile and its peers.

All sides read one checkpoint with random weights and decode the same tokens. They run in turn, a
few steps each, so that a slow minute of the machine affects all of them. A step ends when its
logits are known; to choose a token from them is not measured. The logits of all sides are compared
before and after the steps. benchmarks/README.md says how to install the peers.
"""

from __future__ import annotations

import platform
import random
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.checkpoint import RandomCheckpoint, random_checkpoint
from benchmarks.decode_measured import (
    DTYPES,
    EAGER,
    Agreement,
    Case,
    Measured,
    Turns,
    to_json,
)
from benchmarks.decode_options import PREFILL, parse
from benchmarks.decode_plot import plot
from benchmarks.decode_report import show
from benchmarks.peers.side import NotInstalledError, Side, SideError, SideSpec
from benchmarks.report import write_json
from tpcompile.backends.native.bandwidth import ReadLoop
from tpcompile.compare.comparison import row_of

STEPS_A_TURN = 5


def _rows(seed: int, vocabulary: int, batch: int) -> Iterator[list[int]]:
    """Yield the next token of each sequence, without end."""
    numbers = random.Random(seed)
    while True:
        yield [numbers.randrange(vocabulary) for _ in range(batch)]


def _take(source: Iterator[list[int]], count: int) -> list[list[int]]:
    """Return the next `count` tokens of each sequence, one list per sequence."""
    return [list(row) for row in zip(*islice(source, count), strict=True)]


class Group:
    """Sides that run at the same time and are measured in turn."""

    def __init__(self, checkpoint: RandomCheckpoint, dtype: str, measured: Measured) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._sides: dict[str, Side] = {}
        self._read = ReadLoop(checkpoint.weight_bytes)
        self._measured = measured

    def start(
        self, chosen: Sequence[SideSpec], batch: int, stack: ExitStack, progress: Console
    ) -> None:
        """Load the sides one after another for batches of up to `batch` sequences."""
        for spec in chosen:
            progress.print(f"loading {spec.name}")
            side = stack.enter_context(Side(spec, self._checkpoint.directory, batch))
            try:
                side.ready()
            except SideError as error:
                self._lose(spec.name, side, error)
            else:
                self._sides[spec.name] = side

    def prefill(self, length: int, times: int, progress: Console) -> None:
        """Measure prompts of one length, with different tokens each time."""
        turns = self._turns(Case(self._dtype, 1, length, prompt=True), None)
        chosen = {name: side for name, side in self._sides.items() if side.spec.prompts}
        source = _rows(length, self._checkpoint.vocabulary, 1)
        for time in track(range(times + 1), str(turns.case), console=progress):
            results = self._ask(chosen, "prefill", _take(source, length), length + 1)
            if time == 0:  # the first prompt warms up, and checks that the sides agree
                self._compare(str(turns.case), results)
            else:
                _note(turns, results)

    def decode(self, context: int, batch: int, steps: int, progress: Console) -> None:
        """Measure `steps` steps of every side after `context` tokens, a few steps in turn."""
        case = Case(self._dtype, batch, context)
        turns = self._turns(case, self._checkpoint.step_bytes(context, batch))
        chosen = {name: side for name, side in self._sides.items() if self._supports(side, batch)}
        source = _rows(context, self._checkpoint.vocabulary, batch)
        rounds = -(-steps // STEPS_A_TURN)
        length = context + rounds * (1 + STEPS_A_TURN)
        results = self._ask(chosen, "prefill", _take(source, context), length)
        self._compare(str(case), results)
        for _ in track(range(rounds), str(case), console=progress):
            turns.bandwidths.append(self._read.bandwidth())
            # not measured: the first step of a turn, when the CPU caches hold another side's data
            results = self._ask(chosen, "decode", _take(source, 1 + STEPS_A_TURN))
            _note(turns, {name: (s[1:], logits) for name, (s, logits) in results.items()})
        self._compare(f"{case}, after the steps", results)

    def _turns(self, case: Case, step_bytes: int | None) -> Turns:
        self._measured.turns.append(Turns(case, step_bytes))
        return self._measured.turns[-1]

    def _supports(self, side: Side, batch: int) -> bool:
        most = side.spec.most_sequences
        if most is None or batch <= most:
            return True
        self._measured.not_supported[side.spec.name] = f"it supports batches of up to {most}"
        return False

    def _ask(self, sides: dict[str, Side], request: str, *arguments: Any) -> dict[str, Any]:
        """Send a request to one side after another, so that none runs while another is measured."""
        results = {}
        for name, side in list(sides.items()):
            try:
                results[name] = side.ask(request, *arguments)
            except SideError as error:
                self._lose(name, self._sides.pop(name), error)
                del sides[name]
        return results

    def _lose(self, name: str, side: Side, error: SideError) -> None:
        side.close()
        installed = not isinstance(error, NotInstalledError)
        where = self._measured.missing if installed else self._measured.not_installed
        where[name] = str(error)

    def _compare(self, what: str, results: Mapping[str, tuple[list[float], Any]]) -> None:
        """Compare the logits with eager's, with the tolerance of `tpcompile compare`.

        The tolerance allows for the rounding of every layer.
        """
        if EAGER not in results:
            return
        dtype = self._checkpoint.dtype
        logits = {n: torch.tensor(found).to(dtype) for n, (_, found) in results.items()}
        for name in [name for name in logits if name != EAGER]:
            depth = self._checkpoint.layers
            row = row_of(what, name, logits[name], logits[EAGER], depth=depth)
            self._measured.agreements.append(Agreement(name, what, row.rel, row.ok))


def _note(turns: Turns, results: Mapping[str, tuple[list[float], Any]]) -> None:
    for name, (seconds, _) in results.items():
        turns.seconds.setdefault(name, []).extend(seconds)


def groups(chosen: Sequence[SideSpec], most: int | None) -> list[list[SideSpec]]:
    """Divide the sides into groups of at most `most`. Each of several groups contains eager."""
    if most is None or len(chosen) <= most:
        return [list(chosen)]
    eager = [spec for spec in chosen if spec.name == EAGER]
    others = [spec for spec in chosen if spec.name != EAGER]
    size = most - len(eager)
    return [eager + others[begin : begin + size] for begin in range(0, len(others), size)]


def measure(options: Namespace, progress: Console) -> Measured:
    """Write the weights in each dtype, load the sides, compare them, and measure them in turn."""
    measured = Measured(options.model, _machine(options.threads))
    for dtype in options.dtypes:
        progress.print(f"writing random weights of {options.model} in {dtype}")
        wide = getattr(torch, DTYPES[dtype])
        with random_checkpoint(options.model, dtype=wide) as checkpoint:
            for chosen in groups(options.chosen, options.at_once):
                with ExitStack() as stack:
                    group = Group(checkpoint, dtype, measured)
                    group.start(chosen, max(options.batches), stack, progress)
                    _measure_group(group, options, progress)
    return measured


def _measure_group(group: Group, options: Namespace, progress: Console) -> None:
    for batch in options.batches:
        for context in options.contexts:
            group.decode(context, batch, options.steps, progress)
    if options.prefills:
        group.prefill(PREFILL, options.prefills, progress)


def _machine(threads: int) -> dict[str, Any]:
    """Return the processor, and the threads of each side."""
    return {"cpu": processor(), "threads": threads}


def processor() -> str:
    """Return the name of the processor."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a target is missed, sides disagree, or a side failed."""
    options = parse(arguments, __doc__)
    measured = options.earlier or measure(options, Console(stderr=True))
    if options.plot is not None:
        plot(measured, options.plot)
    if options.json:
        write_json(to_json(measured))
    else:
        show(measured, Console(width=100, highlight=False))
    return 0 if measured.ok else 1
