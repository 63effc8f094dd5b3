"""The comparison of a compiled model with Hugging Face eager, stage by stage.

The stages are Hugging Face's own forward pass, the captured graph, the sharded graph on simulated
ranks, and the emitted modules. Each is compared with the stage before it, the sharded graph value
by value. Then the modules and eager decode some tokens, each with its own KV cache. In bf16 and
fp16, eager and the captured graph run in fp32 too: a value that is no further from its fp32 value
than eager's own is attributed to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tpcompile.compare.agreement import WatchedRanks, same_bits
from tpcompile.compare.choices import Choices
from tpcompile.compare.comparison import Comparison, compare
from tpcompile.compare.program.texts import random_ids
from tpcompile.compare.proofs import Proofs
from tpcompile.compare.rounded_cache import rounding_attention
from tpcompile.compare.routing import Replay
from tpcompile.compare.rows import Row, row_of
from tpcompile.compare.runs import Answers, Eager, Run, ends, side_by_side
from tpcompile.compare.source import Source, in_fp32
from tpcompile.frontend import Captured, capture
from tpcompile.ir.format import Format
from tpcompile.ir.info import info_of
from tpcompile.ir.ops import ATTENTION
from tpcompile.ir.scheme import Scheme
from tpcompile.ir.simulate import Values, logits_of, materialise, run_ranks
from tpcompile.passes import Pass, run_passes
from tpcompile.passes.cache_kv import stored_format
from tpcompile.rewriting.reproducer import write_reproducer
from tpcompile.runtime.kv.packing import Packed, pack
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.ranks.rank import rank_modules
from tpcompile.runtime.ranks.spawned import SpawnedRanks
from tpcompile.runtime.ranks.start import starting
from tpcompile.runtime.weights import opened, weights_of

_RANK_TIMEOUT_S = 60.0


def compare_with_eager(
    model: Any,
    passes: Sequence[Pass],
    *,
    dtype: torch.dtype | None = None,
    scheme: Scheme | None = None,
    rounds: bool = False,
    random_weights: int | None = None,
    adapter: str | Path | None = None,
    lengths: Sequence[int] = (9, 17, 1),
    seed: int = 0,
    tolerance: float | None = None,
    simulate: bool = False,
    threads: int | None = None,
) -> Comparison:
    """Run random tokens, in sequences of these lengths, through all stages.

    The emitted modules run on real ranks, or in this process with `simulate`. Torch has `threads`
    threads on each rank, by default an equal share of the cores.
    """
    captured = capture(model, dtype=dtype, scheme=scheme, rounds=rounds)
    weights = weights_of(captured, model, random_weights, adapter)
    graph, stages = run_passes(captured.graph, passes, on_failure=write_reproducer)
    packed, ids, mask = _tokens(captured, lengths, seed)
    tp = info_of(graph).tp
    ranks = starting(
        tp,
        None,
        torch.device("cpu"),
        inside=simulate or tp == 1,
        timeout=_RANK_TIMEOUT_S,
        threads=threads,
    )
    with ranks as load, opened(weights) as read:
        side = Source(captured, read, stored_format(graph), adapter is not None)
        exact = in_fp32(side) if tolerance is None else None
        modules = rank_modules(graph)
        loaded = load(modules, weights, captured.rotary.fresh)
        watched = WatchedRanks(loaded, modules[0].routers)
        with CompiledModel(captured, graph, stages, watched) as compiled:
            models = [Eager(source, compiled.can_generate()) for source in (side, exact) if source]
            eager = Answers(models, tolerance)
            eager.ask(ids, mask)
            first = _Stage.of("captured", side, packed, eager)
            last = _Stage.of("graph", side, packed, eager, graph)
            truth = _Stage.of("", exact, packed, eager).values if exact else None
            comparison = compare(first.values, graph, last.values, tolerance, truth, last.choices)
            runs = list(side_by_side(eager, compiled, watched, ids, mask))
    where = "one process each" if isinstance(loaded, SpawnedRanks) else "in this process"
    chosen = tuple(first.choices.values())
    compared_runs = list(
        ends(runs, logits_of(first.values)[0], chosen, logits_of(last.values)[0], where)
    )
    more = [*_of_options(side, runs[0], models), *([_agreement(watched)] if tp > 1 else [])]
    choices = (
        *last.choices.values(),
        *(router_choices for run in compared_runs for router_choices in run.choices),
    )
    proofs = Proofs.of(passes, stages)
    comparison = replace(comparison, few_bits=side.few_bits, choices=choices, proofs=proofs)
    return _around(comparison, compared_runs, more)


def _around(comparison: Comparison, runs: Sequence[Run], more: Sequence[Row]) -> Comparison:
    """Add the rows of runs, the first of which comes before the graph, and further rows."""
    before, *after = [[*run.rows()] for run in runs]
    rows = [*(row for run_rows in after for row in run_rows), *more]
    shown = tuple(row.node for row in (*before, *rows))
    return replace(comparison, rows=(*before, *comparison.rows, *rows), shown=shown)


def _of_options(side: Source, prompt: Run, models: Sequence[Eager]) -> Iterator[Row]:
    """Yield the errors of eager that are due to options, if it runs in fp32 too."""
    if side.rounds and prompt.exact is not None:
        yield _of_rounding(prompt.eager, prompt.exact)
    if side.kv is not None and len(models) > 1:
        yield from _of_cache(side.kv, *models)


@dataclass(frozen=True)
class _Stage:
    """The values of a graph with eager's choices, and its own choices by layer."""

    values: Values
    choices: dict[int, Choices]

    @staticmethod
    def of(name: str, source: Source, packed: Packed, eager: Answers, graph: Any = None) -> _Stage:
        """Compute every value of a graph, by default of the captured one."""
        chosen = source.captured.graph if graph is None else graph
        replay = Replay(chosen.graph, eager.experts)
        overrides = {} if source.kv is None else {ATTENTION: rounding_attention(source.kv)}
        with torch.inference_mode():
            weights = materialise(chosen, source.read)
            rotary = source.captured.rotary.fresh()
            inputs = packed.inputs()
            values = run_ranks(chosen, inputs, weights, rotary, {**overrides, **replay.instead})
            return _Stage(values, eager.judge(name, replay.own_choices(values), chosen.graph))


def _of_rounding(logits: torch.Tensor, exact: torch.Tensor) -> Row:
    """Return the error of eager's logits that is due to the rounding of activations.

    No limit applies: the error is that of the option, for any implementation.
    """
    source = "int8 activations beside 16 bits, both eager"
    row = row_of("activations", source, logits, exact, exact=exact)
    return replace(row, ok=not row.problem, limit=math.inf)


def _of_cache(stored: Format, eager: Eager, exact: Eager) -> Iterator[Row]:
    """Yield the errors of the keys and values that eager's cache stores, by layer.

    No limit applies: they are the errors of the option, for any implementation.
    """
    source = f"in the cache as {stored} beside fp32, both eager"
    for layer, sides in enumerate(zip(eager.caches(), exact.caches(), strict=True)):
        for name, actual, expected in zip(("keys", "values"), *sides, strict=True):
            row = row_of(f"l{layer}_{name}", source, actual, expected, layer=layer, exact=expected)
            yield replace(row, ok=not row.problem, limit=math.inf)


def _agreement(ranks: WatchedRanks) -> Row:
    """Compare the results of all ranks in the first step in which they differ, or the last."""
    first, *remaining = ranks.results
    other = next((result for result in remaining if not same_bits(first, result)), first)
    source = f"logits and tokens of {len(ranks.results)} ranks, bit by bit, {ranks.steps} steps"
    row = row_of("ranks", source, other, first, tolerance=0.0)
    return replace(row, ok=ranks.agree_so_far, problem="" if ranks.agree_so_far else "ranks differ")


def _tokens(
    captured: Captured, lengths: Sequence[int], seed: int
) -> tuple[Packed, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = random_ids(lengths, captured.config.vocab_size, generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, max(lengths) - length :] = 1
    return pack(ids, mask), ids, mask
