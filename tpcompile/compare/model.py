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
from typing import Any

import torch

from tpcompile.compare.agreement import WatchedRanks, same_bits
from tpcompile.compare.comparison import Comparison, compare
from tpcompile.compare.rounded_cache import empty_cache, rounding_attention
from tpcompile.compare.rows import Row, row_of, token_margin
from tpcompile.compare.source import Source, eager_model, in_fp32
from tpcompile.errors import UsageError
from tpcompile.frontend import Captured, capture
from tpcompile.ir.format import Format
from tpcompile.ir.info import info_of
from tpcompile.ir.ops import ATTENTION
from tpcompile.ir.scheme import Scheme
from tpcompile.ir.simulate import Values, logits_of, materialise, run_ranks
from tpcompile.passes import Pass, run_passes
from tpcompile.passes.cache_kv import stored_format
from tpcompile.rewriting.reproducer import write_reproducer
from tpcompile.runtime.cache_name import CACHE
from tpcompile.runtime.kv.packing import Packed, pack
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.ranks.rank import rank_modules
from tpcompile.runtime.ranks.spawned import SpawnedRanks
from tpcompile.runtime.ranks.start import starting
from tpcompile.runtime.weights import opened, weights_of

_DECODE_STEPS = 4
_RANK_TIMEOUT_S = 60.0


def compare_with_eager(
    model: Any,
    passes: Sequence[Pass],
    *,
    dtype: torch.dtype | None = None,
    scheme: Scheme | None = None,
    rounds: bool = False,
    random_weights: int | None = None,
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
    weights = weights_of(captured, model, random_weights)
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
        side = Source(captured, read, stored_format(graph))
        exact = in_fp32(side) if tolerance is None else None
        truth = _values(exact, packed) if exact else None
        reference, values = _values(side, packed), _values(side, packed, graph)
        found = compare(reference, graph, values, tolerance, truth)
        sources = [each for each in (side, exact) if each]
        loaded = load(rank_modules(graph), weights, captured.rotary.fresh)
        watched = WatchedRanks(loaded)
        with CompiledModel(captured, graph, stages, watched) as compiled:
            theirs = [_Eager(each, compiled.can_generate()) for each in sources]
            runs = list(_side_by_side(theirs, compiled, ids, mask, tolerance))
    where = "one process each" if isinstance(loaded, SpawnedRanks) else "in this process"
    ends = [run.row() for run in _ends(runs, _logits(reference), _logits(values), where)]
    if side.rounds and runs[0].exact is not None:
        ends.append(_of_rounding(runs[0].eager, runs[0].exact))
    if side.kv is not None and exact is not None:
        ends += _of_cache(side.kv, *theirs)
    ends += [_agreement(watched)] if tp > 1 else []
    shown = tuple(row.node for row in ends)
    rows = (ends[0], *found.rows, *ends[1:])
    return replace(found, rows=rows, shown=shown, few_bits=side.few_bits)


@dataclass(frozen=True)
class _Run:
    """The logits of both models for the same tokens, and of eager in fp32 if needed."""

    name: str
    source: str
    eager: torch.Tensor
    compiled: torch.Tensor
    tolerance: float | None
    exact: torch.Tensor | None = None

    def row(self) -> Row:
        return row_of(
            self.name, self.source, self.compiled, self.eager, self.tolerance, exact=self.exact
        )


class _Eager:
    """A Hugging Face model that processes sequences piece by piece."""

    def __init__(self, source: Source, cached: bool) -> None:
        self._model, self._cached = eager_model(source), cached
        rounds = source.kv is not None
        self._past: Any = empty_cache(self._model.config, source.kv) if rounds else None

    def kept(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys and the values of each layer's cache."""
        for layer in self._past.layers:
            yield layer.keys, layer.values

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self._model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=self._cached,
            **{CACHE: self._past},
        )
        self._past = out.get(CACHE)
        logits: torch.Tensor = out.logits
        return logits


def _side_by_side(
    eager: Sequence[_Eager],
    compiled: CompiledModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    tolerance: float | None,
) -> Iterator[_Run]:
    """Run the prompts, then decode the tokens that eager chooses, through all KV caches.

    `eager` is eager and, if needed, eager in fp32.
    """
    cached = compiled.can_generate()
    with torch.inference_mode():
        theirs = [each(ids, mask) for each in eager]
        ours = compiled(ids, attention_mask=mask, use_cache=cached)
        said, *exact = [logits[mask.bool()] for logits in theirs]
        yield _Run("prompt", "", said, ours.logits[mask.bool()], tolerance, *exact)
        if len(info_of(compiled.graph).outputs) > 1:
            answer = compiled(ids, attention_mask=mask, greedy=True)
            yield _best([logits[:, -1] for logits in theirs], answer.tokens, tolerance)
        for step in range(_room(compiled, ids) if cached else 0):
            token = theirs[0][:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(token)], 1)
            theirs = [each(token, mask) for each in eager]
            past = {CACHE: ours[CACHE]}
            ours = compiled(token, attention_mask=mask, use_cache=True, **past)
            said, *exact = [logits[:, -1] for logits in theirs]
            source = "one by one through the KV cache"
            yield _Run(
                f"decode step {step + 1}", source, said, ours.logits[:, -1], tolerance, *exact
            )


def _ends(
    runs: Sequence[_Run], captured: torch.Tensor, sharded: torch.Tensor, where: str
) -> Iterator[_Run]:
    """Yield the captured graph and the emitted modules on the prompt, then the other runs."""
    prompt, *further = runs
    yield replace(prompt, name="captured", source="Hugging Face eager", compiled=captured)
    yield replace(prompt, name="emitted", source=f"modules of the ranks, {where}", eager=sharded)
    yield from further


def _best(theirs: Sequence[torch.Tensor], tokens: torch.Tensor, tolerance: float | None) -> _Run:
    """Compare the logits of the tokens that the ranks chose with the highest logits."""
    logits, *exact = theirs
    chosen = logits.gather(-1, tokens[:, None])
    source = "chosen without gathering logits"
    margin = token_margin(logits, exact[0] if exact else None, tolerance)
    return _Run("best tokens", source, logits.amax(-1, keepdim=True), chosen, margin)


def _of_rounding(logits: torch.Tensor, exact: torch.Tensor) -> Row:
    """Return the error of eager's logits that is due to the rounding of activations.

    No limit applies: the error is that of the option, for any implementation.
    """
    source = "int8 activations beside 16 bits, both eager"
    row = row_of("activations", source, logits, exact, exact=exact)
    return replace(row, ok=not row.problem, limit=math.inf)


def _of_cache(stored: Format, eager: _Eager, exact: _Eager) -> Iterator[Row]:
    """Yield the errors of the keys and values that eager's cache stores, by layer.

    No limit applies: they are the errors of the option, for any implementation.
    """
    source = f"in the cache as {stored} beside fp32, both eager"
    for layer, sides in enumerate(zip(eager.kept(), exact.kept(), strict=True)):
        for name, found, expected in zip(("keys", "values"), *sides, strict=True):
            row = row_of(f"l{layer}_{name}", source, found, expected, layer=layer, exact=expected)
            yield replace(row, ok=not row.problem, limit=math.inf)


def _agreement(ranks: WatchedRanks) -> Row:
    """Compare the results of all ranks in the first step in which they differ, or the last."""
    first, *others = ranks.results
    other = next((result for result in others if not same_bits(first, result)), first)
    source = f"logits and tokens of {len(ranks.results)} ranks, bit by bit, {ranks.steps} steps"
    row = row_of("ranks", source, other, first, tolerance=0.0)
    return replace(row, ok=ranks.agree_so_far, problem="" if ranks.agree_so_far else "ranks differ")


def _room(compiled: CompiledModel, ids: torch.Tensor) -> int:
    return max(0, min(_DECODE_STEPS, compiled.max_seq_len - ids.shape[1]))


def _tokens(
    captured: Captured, lengths: Sequence[int], seed: int
) -> tuple[Packed, torch.Tensor, torch.Tensor]:
    if not lengths or min(lengths) < 1:
        raise UsageError(
            "The batch or one of its sequences is empty",
            expected="one or more sequences of at least one token",
        )
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    ids = torch.randint(captured.config.vocab_size, shape, generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, max(lengths) - length :] = 1
    return pack(ids, mask), ids, mask


def _values(source: Source, packed: Packed, graph: Any = None) -> Values:
    """Compute every value of a graph, by default of the captured one."""
    chosen = source.captured.graph if graph is None else graph
    instead = {} if source.kv is None else {ATTENTION: rounding_attention(source.kv)}
    with torch.inference_mode():
        weights = materialise(chosen, source.read)
        rotary = source.captured.rotary.fresh()
        return run_ranks(chosen, packed.inputs(), weights, rotary, instead)


def _logits(values: Values) -> torch.Tensor:
    return logits_of(values)[0]
