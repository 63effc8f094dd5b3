"""The compiled model beside Hugging Face eager: three ways to the same logits, and all between.

Hugging Face's own forward pass, the captured graph, the sharded graph value by value on its
simulated ranks, and the emitted modules: each is compared with the one before it. Then the
modules decode some tokens through their KV cache, beside eager with its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tpcompile.errors import UsageError
from tpcompile.frontend import Captured, capture
from tpcompile.inspect.compare import Comparison, compare, row_of
from tpcompile.ir.meta import info_of
from tpcompile.ir.pieces import Read
from tpcompile.ir.simulate import Values, logits_of, materialise, run_ranks
from tpcompile.passes import Pass, run_passes
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.packing import Packed, pack
from tpcompile.runtime.ranks.rank import rank_programs
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
    random_weights: int | None = None,
    lengths: Sequence[int] = (9, 17, 1),
    seed: int = 0,
    tolerance: float | None = None,
    simulate: bool = False,
) -> Comparison:
    """Run random tokens, sequences of these lengths, through all of them.

    The emitted modules run on real ranks, or, with `simulate`, in this process.
    """
    captured = capture(model, dtype=dtype)
    weights = weights_of(captured, model, random_weights)
    graph, stages = run_passes(captured.graph, passes)
    packed, ids, mask = _tokens(captured, lengths, seed)
    tp = info_of(graph).tp
    ranks = starting(tp, None, torch.device("cpu"), simulate=simulate, timeout=_RANK_TIMEOUT_S)
    with ranks as load, opened(weights) as read:
        reference = _values(captured, captured.graph, packed, read)
        values = _values(captured, graph, packed, read)
        found = compare(reference, graph, values, tolerance)
        eager = _eager_model(captured, read)
        loaded = load(rank_programs(graph), weights, captured.rotary.fresh)
        with CompiledModel(captured, graph, stages, loaded) as compiled:
            runs = list(_side_by_side(eager, compiled, ids, mask))
    where = "each a process" if isinstance(loaded, SpawnedRanks) else "in this process"
    pairs = [
        ("captured", "Hugging Face eager", _logits(reference), runs[0].eager),
        ("emitted", f"modules of ranks, {where}", runs[0].compiled, _logits(values)),
        *((run.name, run.source, run.compiled, run.eager) for run in runs[1:]),
    ]
    depth = captured.config.num_hidden_layers
    ends = [row_of(*pair, tolerance, depth=depth) for pair in pairs]
    shown = tuple(row.node for row in ends)
    return replace(found, rows=(ends[0], *found.rows, *ends[1:]), shown=shown)


@dataclass(frozen=True)
class _Run:
    """What both models said to the same tokens."""

    name: str
    source: str
    eager: torch.Tensor
    compiled: torch.Tensor


def _side_by_side(
    eager: Any, compiled: CompiledModel, ids: torch.Tensor, mask: torch.Tensor
) -> Iterator[_Run]:
    """The prompts, then the tokens that eager goes on with, one by one through both KV caches."""
    cached = compiled.can_generate()
    with torch.inference_mode():
        theirs = eager(ids, attention_mask=mask, position_ids=_positions(mask), use_cache=cached)
        ours = compiled(ids, attention_mask=mask, use_cache=cached)
        yield _Run("prompt", "", theirs.logits[mask.bool()], ours.logits[mask.bool()])
        if len(info_of(compiled.graph).outputs) > 1:
            yield _best(theirs.logits[:, -1], compiled(ids, attention_mask=mask, greedy=True))
        for step in range(_room(compiled, ids) if cached else 0):
            token = theirs.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(token)], 1)
            theirs = eager(
                token,
                attention_mask=mask,
                position_ids=_positions(mask)[:, -1:],
                past_key_values=theirs.past_key_values,
                use_cache=True,
            )
            ours = compiled(
                token,
                attention_mask=mask,
                past_key_values=ours.past_key_values,
                use_cache=True,
            )
            source = "one by one through the KV cache"
            yield _Run(f"decode step {step + 1}", source, theirs.logits[:, -1], ours.logits[:, -1])


def _best(logits: torch.Tensor, answer: Any) -> _Run:
    """The logits of the tokens that the ranks chose, beside the highest."""
    chosen = logits.gather(-1, answer.tokens[:, None])
    source = "chosen by ranks without logits"
    return _Run("best tokens", source, logits.amax(-1, keepdim=True), chosen)


def _room(compiled: CompiledModel, ids: torch.Tensor) -> int:
    return max(0, min(_DECODE_STEPS, compiled.max_seq_len - ids.shape[1]))


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def _tokens(
    captured: Captured, lengths: Sequence[int], seed: int
) -> tuple[Packed, torch.Tensor, torch.Tensor]:
    if not lengths or min(lengths) < 1:
        raise UsageError("There is nothing to compare", expected="sequences of one token or more")
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    ids = torch.randint(captured.config.vocab_size, shape, generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, max(lengths) - length :] = 1
    return pack(ids, mask), ids, mask


def _eager_model(captured: Captured, read: Read) -> Any:
    """The user's own model, or Hugging Face's with the same weights."""
    if captured.model is not None:
        return captured.model
    dtype = next(iter(captured.graph.parameters())).dtype
    make: Any = AutoModelForCausalLM.from_config
    model = make(captured.config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name, tuple(slice(0, n) for n in parameter.shape)))
    return model


def _values(captured: Captured, graph: Any, packed: Packed, read: Read) -> Values:
    inputs = packed.inputs()
    with torch.inference_mode():
        return run_ranks(graph, inputs, materialise(graph, read), captured.rotary.fresh())


def _logits(values: Values) -> torch.Tensor:
    return logits_of(values)[0]
