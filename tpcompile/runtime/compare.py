"""The compiled model beside Hugging Face eager: three ways to the same logits, and all between.

Hugging Face's own forward pass, the captured graph, the sharded graph value by value on its
simulated ranks, and the emitted modules: each is compared with the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tpcompile.errors import UsageError
from tpcompile.frontend import Captured, capture
from tpcompile.inspect.compare import Comparison, compare, row_of
from tpcompile.ir.pieces import Read
from tpcompile.ir.simulate import Values, materialise, run_ranks
from tpcompile.passes import Pass, run_passes
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.packing import Packed, pack
from tpcompile.runtime.weights import open_weights


def compare_with_eager(
    model: Any,
    passes: Sequence[Pass],
    *,
    dtype: torch.dtype | None = None,
    random_weights: int | None = None,
    lengths: Sequence[int] = (9, 17, 1),
    seed: int = 0,
    tolerance: float | None = None,
) -> Comparison:
    """Run random tokens, sequences of these lengths, through all of them."""
    captured = capture(model, dtype=dtype)
    with open_weights(captured, model, random_weights) as read:
        packed, ids, mask = _tokens(captured, lengths, seed)
        eager = _eager_logits(captured, read, ids, mask)
        reference = _values(captured, captured.graph, packed, read)
        graph, stages = run_passes(captured.graph, passes)
        values = _values(captured, graph, packed, read)
        with CompiledModel(captured, graph, stages, read) as compiled:
            emitted = compiled(ids, attention_mask=mask).logits[mask.bool()]
    found = compare(reference, graph, values, tolerance)
    depth = captured.config.num_hidden_layers
    ends = [
        row_of(name, source, one, other, tolerance, depth=depth)
        for name, source, one, other in (
            ("captured", "Hugging Face eager", _logits(reference), eager),
            ("emitted", "the modules of the ranks", emitted, _logits(values)),
        )
    ]
    return replace(found, rows=(ends[0], *found.rows, ends[1]))


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


def _eager_logits(
    captured: Captured, read: Read, ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Hugging Face's own, of the real tokens; of the user's model, or of one with its weights."""
    model: Any = captured.model
    if model is None:
        from transformers import AutoModelForCausalLM

        dtype = next(iter(captured.graph.parameters())).dtype
        make: Any = AutoModelForCausalLM.from_config
        model = make(captured.config, dtype=dtype).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(read(name, tuple(slice(0, n) for n in parameter.shape)))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, attention_mask=mask, position_ids=positions).logits
    return logits[mask.bool()]


def _values(captured: Captured, graph: Any, packed: Packed, read: Read) -> Values:
    inputs = packed.inputs()
    with torch.inference_mode():
        return run_ranks(graph, inputs, materialise(graph, read), captured.rotary.fresh())


def _logits(values: Values) -> torch.Tensor:
    found: torch.Tensor = next(v[0] for node, v in values.items() if node.op == "output")
    return found
