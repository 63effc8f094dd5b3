"""`compile`: options to pipeline to backend to a model that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpcompile.errors import UnsupportedError, UsageError, did_you_mean
from tpcompile.frontend import Captured, capture
from tpcompile.passes import Instrument, Pass, default_pipeline, for_ranks, parse_pipeline
from tpcompile.passes.manager import Stage, run_passes
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.weights import weights_of

BACKENDS = ("auto", "torch")


def compile(
    model: Any,
    tp: int = 1,
    *,
    backend: str = "auto",
    dtype: torch.dtype | str | None = None,
    pipeline: str | None = None,
    random_weights: int | None = None,
    simulate: bool = False,
) -> CompiledModel:
    """Compile a Hugging Face causal LM for `tp` ranks.

    `model` is a `PreTrainedModel`, a config, `preset:NAME`, a directory or a hub id. `pipeline`
    is a pass pipeline as text. `random_weights` is a seed for a model that has no weights.
    `simulate` keeps all ranks in this process.
    """
    if backend not in BACKENDS:
        raise UsageError(f"There is no backend {backend!r}", hint=did_you_mean(backend, BACKENDS))
    passes = passes_for(pipeline, tp)
    if tp > 1 and not simulate:
        raise UnsupportedError(
            f"tp={tp} needs ranks that are processes, which this version does not start",
            hint="Use simulate=True to keep all ranks in this process",
        )
    captured = capture(model, dtype=dtype_of(dtype))
    read = weights_of(captured, model, random_weights)
    graph, stages = lower(captured, passes)
    return CompiledModel(captured, graph, stages, read)


def passes_for(pipeline: str | None, tp: int) -> list[Pass]:
    """The passes of a pipeline text, or the standard ones, for so many ranks."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise UsageError(f"tp={tp!r} means nothing", expected="a number of ranks, 1 or more")
    return default_pipeline(tp) if pipeline is None else for_ranks(parse_pipeline(pipeline), tp)


def lower(
    captured: Captured, passes: Sequence[Pass], instruments: Sequence[Instrument] = ()
) -> tuple[Any, list[Stage]]:
    """Run the passes over a captured model."""
    return run_passes(captured.graph, passes, instruments)


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        known = ("float32", "bfloat16", "float16")
        raise UsageError(f"There is no dtype {dtype!r}", hint=did_you_mean(dtype, known))
    return found
