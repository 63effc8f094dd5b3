"""The checks and defaults of the options that `compile`, `schedule` and `explore` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpcompile.cores import MOST_THREADS
from tpcompile.dtypes import (
    ACTIVATIONS,
    AUTO_DTYPE,
    DTYPE_NAMES,
    DTYPES,
    HEADS,
    KV,
    WEIGHTS_FORM,
    integers_of,
)
from tpcompile.errors import UnsupportedError, UsageError, did_you_mean
from tpcompile.ir.format import Kind
from tpcompile.ir.scheme import Integers, Scheme
from tpcompile.passes import Pass, default_pipeline, for_ranks, parse_pipeline
from tpcompile.passes.pipeline import check_names, with_experts, with_kv
from tpcompile.passes.plan_sharding import PlanSharding, check_experts


def passes_for(
    pipeline: str | Sequence[Pass] | None,
    tp: int,
    kv: str | None = None,
    experts: str = "auto",
) -> list[Pass]:
    """Return the passes of `pipeline` (default: the standard pipeline) for `tp` ranks.

    `kv` is what the KV cache stores, and `experts` how experts are sharded: see `with_choices`.
    """
    check_tp(tp)
    if pipeline is None:
        return with_choices(default_pipeline(tp), kv, experts)
    if not isinstance(pipeline, str | Sequence):
        raise UsageError(
            f"pipeline must be text or a sequence of passes, got {type(pipeline).__name__}"
        )
    named = parse_pipeline(pipeline) if isinstance(pipeline, str) else pipeline
    check_names(named)
    passes = with_choices(for_ranks(named, tp), kv, experts)
    for current in passes:
        if isinstance(current, PlanSharding) and current.tp != tp:
            raise UsageError(
                f"The pipeline plans for {current.tp} ranks",
                expected=f"{tp}, the requested tp",
                hint=f"Remove the option from plan-sharding{{tp={current.tp}}}",
            )
    return passes


def with_choices(passes: Sequence[Pass], kv: str | None, experts: str) -> list[Pass]:
    """Return the passes with these options of `compile`: see `check_kv` and `check_experts`."""
    check_kv(kv)
    check_experts(experts)
    return with_experts(with_kv(passes, kv), experts)


def check_tp(tp: int) -> None:
    """Raise unless the number of ranks is a positive int."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise UsageError(f"tp must be a positive int, got {tp!r}")


def check_shards(passes: Sequence[Pass], tp: int) -> None:
    """Raise if the passes do not shard the graph, but there are several ranks."""
    if tp > 1 and not shards(passes):
        raise UsageError(
            f"The pipeline does not shard the graph, which tp={tp} requires",
            hint="Add plan-sharding and the passes after it to the pipeline, or use the default",
        )


def shards(passes: Sequence[Pass]) -> bool:
    """Return whether the passes shard the graph."""
    return any(isinstance(current, PlanSharding) for current in passes)


def check_limit(name: str, limit: int | None) -> None:
    """Raise unless an optional limit is a positive int."""
    whole = isinstance(limit, int) and not isinstance(limit, bool)
    if limit is not None and (not whole or limit < 1):
        raise UsageError(f"{name} must be a positive int, got {limit!r}")


def check_threads(threads: int | None, device: torch.device) -> None:
    """Raise unless the threads of a rank are an int that this device can have, or None."""
    check_limit("threads", threads)
    if threads is None:
        return
    if threads > MOST_THREADS:
        raise UsageError(f"threads must be at most {MOST_THREADS:,}, got {threads:,}")
    if device.type != "cpu":
        raise UsageError(
            f"threads are those of a CPU, got device={str(device)!r}",
            hint="Omit it: on a GPU a rank has one worker per SM",
        )


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the floating-point dtype of this name, in any case, or None for "auto" and None."""
    if dtype is None or (isinstance(dtype, str) and dtype.lower() == AUTO_DTYPE):
        return None
    torch_dtype: Any = dtype
    if isinstance(dtype, str):
        torch_dtype = getattr(torch, DTYPE_NAMES.get(dtype.lower(), dtype.lower()), None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        hint = did_you_mean(str(dtype), (*DTYPES, AUTO_DTYPE))
        raise UsageError(f"{dtype!r} is not a supported dtype", hint=hint)
    return torch_dtype


def scheme_of(weights: str | None, head: str | None = None) -> Scheme | None:
    """Return the scheme by which weights are quantized while they are loaded, None for no change.

    By default the head gets int8. Its groups are as wide as those of the other weights.
    """
    if weights is None:
        if head is not None:
            raise UsageError(
                "head applies to weights that are quantized while they are loaded",
                got=f"head={head!r}",
                hint='Add weights="int8" or weights="int4"',
            )
        return None
    integers = integers_of(weights) if isinstance(weights, str) else None
    if integers is None:
        raise UsageError(f"weights must be {WEIGHTS_FORM}, got {weights!r}")
    if head is not None and head not in HEADS:
        hint = did_you_mean(str(head), HEADS)
        raise UsageError(f"head must be one of {', '.join(HEADS)}, got {head!r}", hint=hint)
    name, columns = integers
    of_head = None if head == "keep" else Integers(_KINDS[head or "int8"], columns)
    return Scheme(Integers(_KINDS[name], columns), of_head)


def rounds_inputs(activations: str) -> bool:
    """Return whether linears with weights in 8 to 4 bits round their inputs to int8."""
    if activations not in ACTIVATIONS:
        raise UsageError(
            f"activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}",
            hint=did_you_mean(str(activations), ACTIVATIONS),
        )
    return activations == "int8"


def check_kv(kv: str | None) -> None:
    """Raise unless `kv` is what the KV cache can store, or None for the model's dtype."""
    if kv is not None and kv not in KV:
        raise UsageError(
            f"kv must be one of {', '.join(KV)}, or None for the model's dtype, got {kv!r}",
            hint=did_you_mean(str(kv), KV),
        )


_KINDS = {kind.word: kind for kind in (Kind.INT8, Kind.INT4)}


def device_of(device: torch.device | str | None) -> torch.device:
    """Return a device by name, the CPU by default. Raise unless it is there and supported."""
    try:
        torch_device = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device must be cpu or cuda, got {device!r}") from error
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"device={str(device)!r} needs a GPU, but torch finds no GPU",
            hint="Omit it to run on the CPU",
        )
    if torch_device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device={str(device)!r} is not supported", expected="cpu or cuda")
    return torch_device
