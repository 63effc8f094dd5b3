"""`python -m benchmarks decode`: time per decode step, of tpcompile and its peers.

All sides read one checkpoint with random weights and decode the same tokens. They run in turn, a
few steps each, so that a slow minute of the machine affects all of them. A step ends when its
logits are known; to choose a token from them is not measured. The logits of all sides are compared
before and after the steps. With --weights, tpcompile and its peers also run with weights in few
bits, beside those that have them in the dtype of the checkpoint. With GGUF files, the native
executor, llama.cpp and OpenVINO read each file in turn instead; a directory is a checkpoint that
only the native executor reads. benchmarks/README.md says how to install the peers.
"""

from __future__ import annotations

import math
import platform
import random
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.bandwidth import ReadLoop
from benchmarks.decode_measured import (
    OPENVINO,
    Agreement,
    Case,
    Loaded,
    Measured,
    Turns,
    is_ours,
    to_json,
)
from benchmarks.decode_options import parse
from benchmarks.decode_plot import plot
from benchmarks.decode_report import WIDTH, show
from benchmarks.decode_subjects import Subject, subjects
from benchmarks.peers.kinds import integers_of
from benchmarks.peers.side import NotInstalledError, Side, SideError, SideSpec
from benchmarks.products import CachedProducts
from benchmarks.report import write_json
from tpcompile.compare.comparison import row_of
from tpcompile.cores import cores

STEPS_A_TURN = 5
FEW_BITS = {"int8": 0.015, "int4": 0.12}
"""The largest errors of logits that integers explain, per square root of layers and one more, over
the largest logit. They allow for the groups and the rounding of peers, which also round activations
to 8 bits, and for random weights, which are not rounded less where it matters."""

AMPLIFIED = 0.03
"""The same for random weights of linear attention in bf16. It divides each head of its results by
their size, also where rounding decides them: with 24 layers of Qwen3.5-0.8B, eager's logits in bf16
are 0.08 of the largest from those in fp32, and those of other sides as far."""

ROUNDED_AGAIN = {OPENVINO: "int4"}
"""Sides that round the weights of a file to formats of their own, and the integers of these."""


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

    def __init__(
        self,
        subject: Subject,
        measured: Measured,
        threads: int | None = None,
    ) -> None:
        self._subject = subject
        self._threads = threads
        self._sides: dict[str, Side] = {}
        self._read = ReadLoop(subject.held)
        self._measured = measured

    def start(
        self, chosen: Sequence[SideSpec], batch: int, stack: ExitStack, progress: Console
    ) -> None:
        """Load the sides one after another for batches of up to `batch` sequences."""
        known = self._measured.loaded.setdefault(self._subject.name, {})
        for spec in chosen:
            progress.print(f"loading {spec.name}")
            side = stack.enter_context(Side(spec, self._subject.path, batch))
            try:
                side.ready()
            except SideError as error:
                self._lose(spec.name, side, error)
            else:
                self._sides[spec.name] = side
                known[spec.name] = Loaded(spec.weights, side.sizes)

    def prefill(self, length: int, times: int, progress: Console) -> None:
        """Measure prompts of one length, with different tokens each time."""
        turns = self._turns(Case(self._subject.name, 1, length, prompt=True))
        chosen = {name: side for name, side in self._sides.items() if side.spec.prompts}
        source = _rows(length, self._subject.vocabulary, 1)
        for time in track(range(times + 1), str(turns.case), console=progress):
            results = self._ask(chosen, "prefill", _take(source, length), length + 1)
            if time == 0:  # the first prompt warms up, and checks that the sides agree
                self._compare(str(turns.case), results)
            else:
                _note(turns, {name: seconds for name, (seconds, _) in results.items()})

    def decode(self, context: int, batch: int, steps: int, progress: Console) -> None:
        """Measure `steps` steps of every side after `context` tokens, a few steps in turn.

        Before and after each turn of a side, a loop reads as many bytes as its step. Before it, the
        kernels of native sides multiply as much as their step, with weights in caches.
        """
        case = Case(self._subject.name, batch, context)
        turns = self._turns(case)
        chosen = {name: side for name, side in self._sides.items() if self._supports(side, batch)}
        source = _rows(context, self._subject.vocabulary, batch)
        rounds = -(-steps // STEPS_A_TURN)
        length = context + rounds * (1 + STEPS_A_TURN)
        results = self._ask(chosen, "prefill", _take(source, context), length)
        self._compare(str(case), results)
        with self._products(chosen, batch) as products:
            for _ in track(range(rounds), str(case), console=progress):
                tokens = _take(source, 1 + STEPS_A_TURN)
                results = {}
                for name, side in list(chosen.items()):
                    if name in products:
                        turns.products.setdefault(name, []).append(products[name].seconds())
                    before = self._bandwidth(case, name)
                    results |= self._ask({name: side}, "decode", tokens)
                    if name not in results:
                        del chosen[name]
                    elif before is not None and (after := self._bandwidth(case, name)) is not None:
                        turns.bandwidths.setdefault(name, []).append([before, after])
                # not measured: the first step of a turn, when caches hold another side's data
                _note(turns, {name: seconds[1:] for name, (seconds, _) in results.items()})
        self._compare(f"{case}, after the steps", results)

    def _bandwidth(self, case: Case, name: str) -> float | None:
        """Read as many bytes as a step of a side, if that is known; return those per second."""
        size = self._measured.step_bytes(case, name)
        return None if size is None else self._read.bandwidth(self._threads, size)

    @contextmanager
    def _products(
        self, chosen: Mapping[str, Side], batch: int
    ) -> Iterator[dict[str, CachedProducts]]:
        """Provide the products of native sides; sides with the same weights share them.

        A file has none: its layers may differ in the kinds of weights.
        """
        with ExitStack() as stack:
            cached: dict[tuple[str, str | None, str], CachedProducts] = {}
            products: dict[str, CachedProducts] = {}
            for name, side in chosen.items():
                spec = side.spec
                if spec.kind != "tpcompile-native" or not self._subject.preset:
                    continue
                key = spec.weights, spec.head, spec.activations
                if key not in cached:
                    cached[key] = stack.enter_context(self._cached(batch, *key))
                products[name] = cached[key]
            yield products

    def _cached(
        self, batch: int, weights: str, head: str | None, activations: str
    ) -> CachedProducts:
        preset, dtype = self._subject.preset, self._subject.dtype
        threads = self._threads or cores()
        return CachedProducts(preset, dtype, batch, threads, weights or None, head, activations)

    def _turns(self, case: Case) -> Turns:
        self._measured.turns.append(Turns(case))
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
        if isinstance(error, NotInstalledError):
            self._measured.not_installed[name] = str(error)
        else:
            self._measured.missing.setdefault(self._subject.name, {})[name] = str(error)

    def _compare(self, label: str, results: Mapping[str, tuple[list[float], Any]]) -> None:
        """Compare the logits with the reference's, with the tolerance of `tpcompile compare`.

        The tolerance allows for the rounding of every layer. That of weights in few bits also
        allows for theirs. So the sides of tpcompile with the same such weights are also compared
        with one of them, with the tolerance of their dtype.
        """
        dtype, reference = self._subject.dtype, self._measured.reference
        logits = {n: torch.tensor(values).to(dtype) for n, (_, values) in results.items()}
        alike: dict[tuple[str, str], str] = {}
        for name in [name for name in logits if name != reference]:
            spec = self._sides[name].spec
            weights = spec.weights
            if reference in logits:
                self._agree(label, name, reference, logits, self._explained(spec))
            if weights and is_ours(name):
                first = alike.setdefault((weights, spec.activations), name)
                if name != first:
                    self._agree(label, name, first, logits, self._amplified)

    @property
    def _amplified(self) -> float | None:
        """The error that layers of linear attention explain; None without any."""
        return AMPLIFIED if self._subject.linear else None

    def _explained(self, spec: SideSpec) -> float | None:
        """Return the error that the integers of the side or of the file, and layers, explain."""
        integers = integers_of(spec.weights) or self._subject.integers
        if self._subject.integers:
            integers = ROUNDED_AGAIN.get(spec.name, integers)
        causes = [FEW_BITS.get(integers), self._amplified]
        return max((cause for cause in causes if cause is not None), default=None)

    def _agree(
        self,
        label: str,
        name: str,
        reference: str,
        logits: Mapping[str, torch.Tensor],
        explained: float | None = None,
    ) -> None:
        depth = self._subject.layers
        tolerance = None if explained is None else explained * math.sqrt(1 + depth)
        row = row_of(label, name, logits[name], logits[reference], tolerance, depth=depth)
        self._measured.agreements.append(Agreement(name, label, row.rel, row.ok, reference))


def _note(turns: Turns, seconds: Mapping[str, list[float]]) -> None:
    for name, times in seconds.items():
        turns.seconds.setdefault(name, []).extend(times)


def groups(chosen: Sequence[SideSpec], most: int | None, reference: str) -> list[list[SideSpec]]:
    """Divide the sides into groups of at most `most`; several groups all contain the reference."""
    if most is None or len(chosen) <= most:
        return [list(chosen)]
    always = [spec for spec in chosen if spec.name == reference]
    remaining = [spec for spec in chosen if spec.name != reference]
    size = most - len(always)
    return [always + remaining[begin : begin + size] for begin in range(0, len(remaining), size)]


def measure(options: Namespace, progress: Console) -> Measured:
    """Load the sides on each subject, compare them, and measure them in turn."""
    model = "given models" if options.files else options.model
    measured = Measured(model, _machine(options.threads), options.reference)
    for subject in subjects(options, progress):
        measured.weights[subject.name] = subject.read
        for chosen in groups(options.chosen, options.at_once, options.reference):
            with ExitStack() as stack:
                group = Group(subject, measured, options.threads)
                group.start(chosen, max(options.batches), stack, progress)
                _measure_group(group, options, progress)
    return measured


def _measure_group(group: Group, options: Namespace, progress: Console) -> None:
    for batch in options.batches:
        for context in options.contexts:
            group.decode(context, batch, options.steps, progress)
    if options.prefills:
        for length in options.prompts:
            group.prefill(length, options.prefills, progress)


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
        show(measured, Console(width=WIDTH, highlight=False))
    return 0 if measured.ok else 1
