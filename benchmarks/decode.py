"""`python -m benchmarks decode`: time per decode step, of tpcompile and its peers.

All sides read one checkpoint with random weights and decode the same tokens. They run in turn, a
few steps each, so that a slow minute of the machine affects all of them. A step ends when its
logits are known; to choose a token from them is not measured. The logits of all sides are compared
before and after the steps. With --weights, tpcompile and its peers also run with weights in few
bits, beside those that have them in the dtype of the checkpoint. benchmarks/README.md says how to
install the peers.
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

from benchmarks.checkpoint import RandomCheckpoint, kept_checkpoint, random_checkpoint
from benchmarks.decode_measured import (
    DTYPES,
    EAGER,
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
from benchmarks.peers.kinds import integers_of
from benchmarks.peers.side import NotInstalledError, Side, SideError, SideSpec
from benchmarks.products import CachedProducts
from benchmarks.report import write_json
from tpcompile.backends.native.bandwidth import ReadLoop
from tpcompile.compare.comparison import row_of
from tpcompile.cores import cores

STEPS_A_TURN = 5
FEW_BITS = {"int8": 0.015, "int4": 0.12}
"""The largest errors of logits that integers explain, per square root of layers and one more, over
the largest logit. They allow for the groups and the rounding of peers, which also round activations
to 8 bits, and for random weights, which are not rounded less where it matters."""


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
        checkpoint: RandomCheckpoint,
        dtype: str,
        measured: Measured,
        threads: int | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._threads = threads
        self._dtype = dtype
        self._sides: dict[str, Side] = {}
        self._read = ReadLoop(checkpoint.weight_bytes)
        self._measured = measured

    def start(
        self, chosen: Sequence[SideSpec], batch: int, stack: ExitStack, progress: Console
    ) -> None:
        """Load the sides one after another for batches of up to `batch` sequences."""
        known = self._measured.loaded.setdefault(self._dtype, {})
        for spec in chosen:
            progress.print(f"loading {spec.name}")
            side = stack.enter_context(Side(spec, self._checkpoint.directory, batch))
            try:
                side.ready()
            except SideError as error:
                self._lose(spec.name, side, error)
            else:
                self._sides[spec.name] = side
                known[spec.name] = Loaded(spec.weights, side.sizes)

    def prefill(self, length: int, times: int, progress: Console) -> None:
        """Measure prompts of one length, with different tokens each time."""
        turns = self._turns(Case(self._dtype, 1, length, prompt=True))
        chosen = {name: side for name, side in self._sides.items() if side.spec.prompts}
        source = _rows(length, self._checkpoint.vocabulary, 1)
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
        case = Case(self._dtype, batch, context)
        turns = self._turns(case)
        chosen = {name: side for name, side in self._sides.items() if self._supports(side, batch)}
        source = _rows(context, self._checkpoint.vocabulary, batch)
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
        """Provide the products of native sides; sides with the same weights share them."""
        with ExitStack() as stack:
            made: dict[tuple[str, str | None, str], CachedProducts] = {}
            found: dict[str, CachedProducts] = {}
            for name, side in chosen.items():
                spec = side.spec
                if spec.kind != "tpcompile-native":
                    continue
                key = spec.weights, spec.head, spec.activations
                if key not in made:
                    made[key] = stack.enter_context(self._cached(batch, *key))
                found[name] = made[key]
            yield found

    def _cached(
        self, batch: int, weights: str, head: str | None, activations: str
    ) -> CachedProducts:
        model, dtype = self._measured.model, self._checkpoint.dtype
        threads = self._threads or cores()
        return CachedProducts(model, dtype, batch, threads, weights or None, head, activations)

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
        installed = not isinstance(error, NotInstalledError)
        where = self._measured.missing if installed else self._measured.not_installed
        where[name] = str(error)

    def _compare(self, what: str, results: Mapping[str, tuple[list[float], Any]]) -> None:
        """Compare the logits with eager's, with the tolerance of `tpcompile compare`.

        The tolerance allows for the rounding of every layer. That of weights in few bits also
        allows for theirs. So the sides of tpcompile with the same such weights are also compared
        with one of them, with the tolerance of their dtype.
        """
        dtype = self._checkpoint.dtype
        logits = {n: torch.tensor(found).to(dtype) for n, (_, found) in results.items()}
        alike: dict[tuple[str, str], str] = {}
        for name in [name for name in logits if name != EAGER]:
            spec = self._sides[name].spec
            weights = spec.weights
            if EAGER in logits:
                self._agree(what, name, EAGER, logits, FEW_BITS.get(integers_of(weights)))
            if weights and is_ours(name):
                reference = alike.setdefault((weights, spec.activations), name)
                if name != reference:
                    self._agree(what, name, reference, logits)

    def _agree(
        self,
        what: str,
        name: str,
        reference: str,
        logits: Mapping[str, torch.Tensor],
        few_bits: float | None = None,
    ) -> None:
        depth = self._checkpoint.layers
        tolerance = None if few_bits is None else few_bits * math.sqrt(1 + depth)
        row = row_of(what, name, logits[name], logits[reference], tolerance, depth=depth)
        self._measured.agreements.append(Agreement(name, what, row.rel, row.ok, reference))


def _note(turns: Turns, seconds: Mapping[str, list[float]]) -> None:
    for name, own in seconds.items():
        turns.seconds.setdefault(name, []).extend(own)


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
        with _checkpoint(options, dtype, wide) as checkpoint:
            measured.weights_read = checkpoint.weights_read
            for chosen in groups(options.chosen, options.at_once):
                with ExitStack() as stack:
                    group = Group(checkpoint, dtype, measured, options.threads)
                    group.start(chosen, max(options.batches), stack, progress)
                    _measure_group(group, options, progress)
    return measured


@contextmanager
def _checkpoint(options: Namespace, dtype: str, wide: torch.dtype) -> Iterator[RandomCheckpoint]:
    """Provide the checkpoint, in the directory of the options or in a temporary one."""
    if options.directory is None:
        with random_checkpoint(options.model, dtype=wide) as made:
            yield made
    else:
        yield kept_checkpoint(options.directory / f"{options.model}-{dtype}", options.model, wide)


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
