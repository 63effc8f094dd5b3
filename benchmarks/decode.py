"""`python -m benchmarks decode`: tokens per second compared with Hugging Face, batch 1, greedy.

All sides read one checkpoint with random weights and decode the same tokens. They run in turn, a
few steps each, so that a slow minute of the machine affects all of them. Their logits are compared
before and after the steps.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.checkpoint import RandomCheckpoint, random_checkpoint
from benchmarks.counts import not_negative, positive
from benchmarks.decode_measured import (
    EAGER,
    HUGGING_FACE_TP,
    MODEL,
    NATIVE,
    NATIVE_TWO,
    ONE,
    TWO,
    Agreement,
    Measured,
)
from benchmarks.decode_report import show, to_json
from benchmarks.peers.side import Side, SideError, SideSpec
from benchmarks.report import write_json
from tpcompile.backends.native.bandwidth import ReadLoop
from tpcompile.compare.comparison import row_of

PREFILL = 512
STEPS_A_TURN = 5


def specs(threads: int) -> list[SideSpec]:
    """Return all sides. Each has the same total number of threads, which its ranks share."""
    return [
        SideSpec(EAGER, "eager", 1, threads),
        SideSpec(ONE, "tpcompile", 1, threads),
        SideSpec(HUGGING_FACE_TP, "hugging-face-tp", 2, max(1, threads // 2)),
        SideSpec(TWO, "tpcompile", 2, threads),
        SideSpec(NATIVE, "tpcompile-native", 1, threads),
        SideSpec(NATIVE_TWO, "tpcompile-native", 2, threads),
    ]


def _tokens(seed: int, vocabulary: int) -> Iterator[int]:
    numbers = random.Random(seed)
    while True:
        yield numbers.randrange(vocabulary)


class Benchmark:
    """The running sides, and their measurements."""

    def __init__(self, checkpoint: RandomCheckpoint, model: str) -> None:
        self._checkpoint = checkpoint
        self._sides: dict[str, Side] = {}
        self._read = ReadLoop(checkpoint.weight_bytes)
        self.measured = Measured(model)

    def start(self, chosen: Sequence[SideSpec], stack: ExitStack, progress: Console) -> None:
        """Load the sides one after another. A side that cannot start is recorded as missing."""
        for spec in track(chosen, "loading", console=progress):
            side = stack.enter_context(Side(spec, self._checkpoint.directory))
            try:
                side.ready()
            except SideError as error:
                side.close()
                self.measured.missing[spec.name] = str(error)
            else:
                self._sides[spec.name] = side

    def prefill(self, length: int, times: int, progress: Console) -> None:
        """Measure prompts of one length, with different tokens each time."""
        chosen = {name: s for name, s in self._sides.items() if name in (EAGER, ONE)}
        source = _tokens(length, self._checkpoint.vocabulary)
        for time in track(range(times + 1), f"prefill of {length}", console=progress):
            results = self._ask(chosen, "prefill", list(islice(source, length)))
            if time == 0:  # the first prompt warms up, and checks that the sides agree
                self._compare(f"prefill of {length}", results)
            else:
                self._note("prefill", results)

    def decode(self, context: int, steps: int, progress: Console) -> None:
        """Measure `steps` steps of every side after `context` tokens, a few steps in turn."""
        self.measured.step_bytes[str(context)] = self._checkpoint.step_bytes(context)
        source = _tokens(context, self._checkpoint.vocabulary)
        prompt = list(islice(source, context))
        self._compare(f"context {context}", self._ask(self._sides, "prefill", prompt))
        for _ in track(range(-(-steps // STEPS_A_TURN)), f"context {context}", console=progress):
            self.measured.bandwidths.append(self._read.bandwidth())
            # not measured: the first step of a turn, when the CPU caches hold another side's data
            results = self._ask(self._sides, "decode", list(islice(source, 1 + STEPS_A_TURN)))
            self._note(str(context), {n: (s[1:], logits) for n, (s, logits) in results.items()})
        self._compare(f"decode from {context}", results)

    def _ask(self, sides: Mapping[str, Side], request: str, tokens: list[int]) -> dict[str, Any]:
        """Send a request to one side after another, so that none runs while another is measured."""
        results = {}
        for name, side in list(sides.items()):
            try:
                results[name] = side.ask(request, tokens)
            except SideError as error:
                self.measured.missing[name] = str(error)
                self._sides.pop(name).close()
        return results

    def _note(self, what: str, results: Mapping[str, tuple[list[float], Any]]) -> None:
        for name, (seconds, _) in results.items():
            self.measured.seconds.setdefault(name, {}).setdefault(what, []).extend(seconds)

    def _compare(self, what: str, results: Mapping[str, tuple[list[float], Any]]) -> None:
        """Compare the logits with eager's, with the tolerance of `tpcompile compare`.

        The tolerance allows for the rounding of every layer.
        """
        if EAGER not in results:
            return
        dtype = self._checkpoint.dtype
        logits = {n: torch.from_numpy(found).to(dtype) for n, (_, found) in results.items()}
        for name in logits.keys() - {EAGER}:
            depth = self._checkpoint.layers
            row = row_of(what, name, logits[name], logits[EAGER], depth=depth)
            self.measured.agreements.append(Agreement(name, what, row.rel, row.ok))


def measure(
    model: str,
    chosen: Sequence[SideSpec],
    contexts: Sequence[int],
    steps: int,
    prefills: int,
    progress: Console,
) -> Measured:
    """Write the weights, load all sides, compare them, and measure them in turn."""
    progress.print(f"writing random weights of {model}")
    with random_checkpoint(model) as checkpoint, ExitStack() as stack:
        benchmark = Benchmark(checkpoint, model)
        benchmark.start(chosen, stack, progress)
        for context in contexts:
            benchmark.decode(context, steps, progress)
        if prefills:
            benchmark.prefill(PREFILL, prefills, progress)
        return benchmark.measured


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a target is missed, sides disagree, or a side is missing."""
    parser = argparse.ArgumentParser("python -m benchmarks decode", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of the table")
    add(
        "--model",
        default=MODEL,
        metavar="PRESET",
        help=f"model to measure; targets apply to {MODEL}",
    )
    add(
        "--contexts",
        type=positive,
        nargs="+",
        default=[64, 1024],
        help="numbers of tokens before the first step",
    )
    add("--steps", type=positive, default=20, help="decode steps of each side at each context")
    add(
        "--prefills",
        type=not_negative,
        default=20,
        help=f"number of prefills of {PREFILL} tokens; may be 0",
    )
    add(
        "--threads",
        type=positive,
        default=os.cpu_count() or 1,
        help="threads of each side, in total",
    )
    add("--sides", nargs="+", metavar="NAME", help="measure only sides whose name contains a NAME")
    options = parser.parse_args(arguments)
    chosen = [
        spec
        for spec in specs(options.threads)
        if not options.sides or any(word in spec.name for word in options.sides)
    ]
    if not chosen:
        parser.error(
            f"--sides matches no side; the sides are {', '.join(s.name for s in specs(1))}"
        )
    measured = measure(
        options.model,
        chosen,
        options.contexts,
        options.steps,
        options.prefills,
        Console(stderr=True),
    )
    if options.json:
        write_json(to_json(measured))
    else:
        show(measured, Console(width=110, highlight=False))
    return 0 if measured.ok else 1
