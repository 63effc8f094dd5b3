"""`compile`: options to pipeline to backend to a model that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tpcompile.errors import UnsupportedError, UsageError, did_you_mean
from tpcompile.frontend import capture as captured_of
from tpcompile.passes import Pass, default_pipeline, for_ranks, parse_pipeline, run_passes
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.weights import open_weights

BACKENDS = ("auto", "torch")
PLANNED = ("reference", "native", "triton")


def capture(model: Any, *, dtype: torch.dtype | str | None = None) -> fx.GraphModule:
    """The raw graph of MODEL, typed, on one rank: what the passes start from."""
    return captured_of(model, dtype=dtype_of(dtype)).graph


def compile(
    model: Any,
    tp: int = 1,
    *,
    backend: str = "auto",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    max_seq_len: int | None = None,
    max_batch: int | None = None,
    pipeline: str | Sequence[Pass] | None = None,
    random_weights: int | None = None,
    simulate: bool = False,
) -> CompiledModel:
    """Compile a Hugging Face causal LM for `tp` ranks.

    `model` is a `PreTrainedModel`, a config, `preset:NAME`, a directory or a hub id. `pipeline`
    is a pass pipeline as text, or passes; the standard one by default. `random_weights` is a
    seed for a model that has no weights. `simulate` keeps all ranks in this process.
    """
    if backend in PLANNED or max_seq_len is not None or max_batch is not None:
        raise UnsupportedError(
            f"backend={backend!r}, max_seq_len={max_seq_len}, max_batch={max_batch}",
            expected="the torch backend, which keeps no KV cache yet",
        )
    if device is not None and torch.device(device).type != "cpu":
        raise UnsupportedError(f"device={str(device)!r}", expected="cpu, for simulated ranks")
    if backend not in BACKENDS:
        raise UsageError(
            f"There is no backend {backend!r}", hint=did_you_mean(str(backend), BACKENDS)
        )
    passes = passes_for(pipeline, tp)
    if tp > 1 and not any(isinstance(current, PlanSharding) for current in passes):
        raise UsageError(
            f"The pipeline shards nothing, and tp={tp} ranks were asked for",
            hint="Put plan-sharding and the passes behind it into the pipeline",
        )
    if tp > 1 and not simulate:
        raise UnsupportedError(
            f"tp={tp} needs ranks that are processes, which this version does not start",
            hint="Use simulate=True to keep all ranks in this process",
        )
    captured = captured_of(model, dtype=dtype_of(dtype))
    with open_weights(captured, model, random_weights) as read:
        graph, stages = run_passes(captured.graph, passes)
        return CompiledModel(captured, graph, stages, read)


def passes_for(pipeline: str | Sequence[Pass] | None, tp: int) -> list[Pass]:
    """The passes of a pipeline, or the standard ones, all of them for so many ranks."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise UsageError(f"tp={tp!r} means nothing", expected="a number of ranks, 1 or more")
    if pipeline is None:
        return default_pipeline(tp)
    named = parse_pipeline(pipeline) if isinstance(pipeline, str) else pipeline
    passes = for_ranks(named, tp)
    for current in passes:
        if isinstance(current, PlanSharding) and current.tp != tp:
            raise UsageError(
                f"The pipeline plans for {current.tp} ranks",
                expected=f"{tp}, the tp that was asked for",
                hint=f"Leave tp={current.tp} out of the pipeline",
            )
    return passes


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by its name in torch."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        hint = did_you_mean(str(dtype), ("float32", "bfloat16", "float16"))
        raise UsageError(f"There is no dtype {dtype!r} to compile for", hint=hint)
    return found
