"""The time of a step: from verified schedules of a target, or from steps of a real model."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch

from tpcompile.frontend import capture
from tpcompile.passes import run_passes
from tpcompile.runtime.ranks.step import size_for
from tpcompile.scheduling import choose
from tpcompile.serving.plan import Piece, Plan, groups
from tpcompile.serving.plan import Sequence as Sequence_
from tpcompile.serving.rows import ROWS
from tpcompile.serving.steps import step_of
from tpcompile.vm.program.instruction import WeightInstruction
from tpcompile.vm.schedule.measured import timing_at
from tpcompile.vm.schedule.scheduled import scheduled
from tpcompile.vm.targets import Target

_REPEATS = 5


@dataclass(frozen=True)
class Prices:
    """The seconds of steps."""

    decode: dict[int, list[tuple[float, float]]]
    """By batch of a program: seconds at some mean contexts, ascending."""
    chunk: tuple[float, float, float]
    """Seconds of a run of chunks, per token, and per pair of a token and one before its chunk."""

    def of(self, plan: Plan) -> float:
        """Return the seconds of a step."""
        run, token, pair = self.chunk
        seconds = sum(piece.count * (token + piece.first * pair) for piece in plan.chunks)
        seconds += run * sum(1 for _ in groups(plan.chunks, lambda piece: piece.count < ROWS))
        if plan.decodes:
            context = sum(piece.first for piece in plan.decodes) / len(plan.decodes)
            seconds += self._decode(len(plan.decodes), context)
        return seconds

    def _decode(self, sequences: int, context: float) -> float:
        sizes = sorted(self.decode)
        known = self.decode[sizes[min(bisect_left(sizes, sequences), len(sizes) - 1)]]
        place = min(max(1, bisect_left(self._contexts, context)), len(known) - 1)
        (low, first), (high, second) = known[place - 1], known[place]
        return max(first * 0.5, first + (second - first) * (context - low) / (high - low))

    @cached_property
    def _contexts(self) -> list[float]:
        return [context for context, _ in next(iter(self.decode.values()))]


def from_schedules(
    model: str, target: Target, batch: int, longest: int, say: Callable[[str], None]
) -> Prices:
    """Return the prices of a target: decode steps simulated, chunks by bytes and arithmetic."""
    contexts = [c for c in (64, 512, 2048, 8192, 32768) if c < longest] + [longest]
    decode: dict[int, list[tuple[float, float]]] = {}
    graph = None
    weights = 0
    for size in _sizes(batch):
        say(f"scheduling a step of {size} sequences")
        choices = choose(target=target, batch=size, context=longest, max_seq_len=longest)
        if graph is None:
            graph, _ = run_passes(capture(model).graph, choices.passes)
        program = scheduled(graph, target, choices.plan).proved
        decode[size] = [(float(c), timing_at(program, target, c).makespan / 1e6) for c in contexts]
        weights = sum(i.traffic for i in program.instructions if isinstance(i, WeightInstruction))
        cache = next(b for b in program.buffers if b.role.kind == "cache")
    assert cache.storage is not None
    layers, _, _, heads, width = cache.storage
    macs = weights / cache.dtype.itemsize
    rate = target.workers * target.worker_matrix_macs_per_us * 1e6  # modules run chunks
    pair = 2 * layers * heads * width * 2 / rate
    per_token = macs / rate
    return Prices(decode, (weights / target.bytes_per_us / 1e6, per_token, pair))


class Recorder:
    """The steps that a model runs, with their times, in place of its `run_step`."""

    def __init__(self, model: Any) -> None:
        self._run = model.run_step
        self.decodes: list[tuple[int, float, float]] = []
        """Sequences, their mean context, and the seconds."""
        self.chunks: list[tuple[int, int, float]] = []
        """By run of chunks: tokens, pairs of a token and one before its chunk, and the seconds."""
        model.run_step = self

    def __call__(self, step: Any) -> torch.Tensor:
        started = time.perf_counter()
        output: torch.Tensor = self._run(step)
        seconds = time.perf_counter() - started
        lengths, tokens = step.inputs["lengths"], len(step.inputs["input_ids"])
        if len(lengths) == tokens:
            self.decodes.append((tokens, float(lengths.float().mean()), seconds))
        else:
            counts = step.inputs["starts"].diff()
            self.chunks.append((tokens, int((counts * (lengths - counts)).sum()), seconds))
        return output

    def prices(self) -> Prices:
        """Return prices that fit these steps: by batch of a program, and linear for chunks."""
        by_batch: dict[int, list[tuple[float, float]]] = {}
        for sequences, context, seconds in self.decodes:
            by_batch.setdefault(size_for(sequences), []).append((context, seconds))
        ends = (0.0, max(context for _, context, _ in self.decodes))
        decode = {
            batch: [(end, sum(s for _, s in steps) / len(steps)) for end in ends]
            for batch, steps in by_batch.items()
        }
        rows = torch.tensor([[1.0, c, pairs] for c, pairs, _ in self.chunks]).double()
        times = torch.tensor([[s] for _, _, s in self.chunks]).double()
        scale = rows.abs().amax(0).clamp(min=1.0)
        solved = torch.linalg.lstsq(rows / scale, times, driver="gelsd").solution[:, 0] / scale
        run, token, pair = solved.tolist()
        return Prices(decode, (run, token, pair))


def from_model(engine: Any, contexts: Sequence[int]) -> Prices:
    """Measure steps of an engine's model that has nothing else to do."""
    model, limits = engine.model, engine.scheduler.limits
    block = limits.block

    def run(sequences: int, first: int, count: int, output: str) -> float:
        pieces = []
        block_count = -(-(first + count) // block)
        reserved = model.reserve(sequences * block_count, 2 * sequences if limits.states else 0)
        for number in range(sequences):
            blocks = list(range(number * block_count, (number + 1) * block_count))
            sequence = Sequence_((number, number), [1] * (first + count), blocks=blocks)
            sequence.state, sequence.next_state = 2 * number, 2 * number + 1
            pieces.append(Piece(sequence, first, count))
        step = step_of(pieces, output, reserved)
        seconds = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            model.run_step(step).cpu()
            seconds.append(time.perf_counter() - started)
        reserved.release()
        return median(seconds)

    decode = {
        size: [(float(c), run(min(size, limits.sequences), c, 1, "tokens")) for c in contexts]
        for size in _sizes(limits.sequences)
    }
    whole, part = (run(1, 0, count, "logits") for count in (limits.chunk, limits.chunk // 4))
    far = run(1, contexts[-1] // limits.chunk * limits.chunk, limits.chunk, "logits")
    token = (whole - part) / (limits.chunk - limits.chunk // 4)
    pair = max(0.0, far - whole) / (limits.chunk * max(1, contexts[-1]))
    return Prices(decode, (max(0.0, whole - token * limits.chunk), token, pair))


def _sizes(batch: int) -> list[int]:
    """Return the rows of the programs for batches up to `batch`."""
    return sorted({size_for(rows) for rows in range(1, batch + 1)})
