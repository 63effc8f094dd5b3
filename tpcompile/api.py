"""`compile`: options to pipeline to backend to a model that runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import fx
from torch.distributed import is_torchelastic_launched

from tpcompile.errors import UnsupportedError, UsageError, did_you_mean
from tpcompile.frontend import capture as captured_of
from tpcompile.passes import Pass, default_pipeline, for_ranks, parse_pipeline, run_passes
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.plugins import load_plugins
from tpcompile.runtime.generation import generation_config_of
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.programs import StepPrograms
from tpcompile.runtime.ranks.joined import find_group
from tpcompile.runtime.ranks.machine import MachineRanks
from tpcompile.runtime.ranks.rank import rank_modules
from tpcompile.runtime.ranks.start import starting
from tpcompile.runtime.weights import weights_of
from tpcompile.vm.targets import target_of

BACKENDS = ("auto", "torch", "reference")
_LONGEST_S = 7 * 24 * 3600
PLANNED = ("native", "triton")


def capture(model: Any, *, dtype: torch.dtype | str | None = None) -> fx.GraphModule:
    """The raw graph of MODEL, typed, on one rank: what the passes start from."""
    return captured_of(model, dtype=dtype_of(dtype)).graph


def compile(
    model: Any,
    tp: int | None = None,
    *,
    backend: str = "auto",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    max_seq_len: int | None = None,
    max_batch: int | None = None,
    pipeline: str | Sequence[Pass] | None = None,
    random_weights: int | None = None,
    simulate: bool = False,
    rank_timeout: float = 60.0,
) -> CompiledModel:
    """Compile a Hugging Face causal LM for `tp` ranks.

    `model` is a `PreTrainedModel`, a config, `preset:NAME`, a directory or a hub id. Under
    torchrun, or in an initialised process group, this process is one of the ranks, and `tp` is
    by default their number; in a plain script it is 1, and more are started as processes of
    their own. `simulate` keeps all ranks in this process.

    `backend` is what runs decode steps: "torch" the modules of the ranks, "reference" a machine
    that follows the verified program instruction by instruction, slowly, with all ranks in this
    process. "auto" is "torch".

    `max_seq_len` (default: the configuration's) and `max_batch` limit what the KV cache may
    hold. `pipeline` is a pass pipeline as text, or passes; the standard one by default.
    `random_weights` is a seed for a model that has no weights. A rank that says nothing for
    `rank_timeout` seconds is taken for dead.
    """
    load_plugins()
    _check_backend(backend)
    _check_limit("max_seq_len", max_seq_len)
    _check_limit("max_batch", max_batch)
    _check_seconds(rank_timeout)
    place = _device_of(device)
    if backend == "reference":
        _check_machine(place, simulate)
        simulate = True
    limit = timedelta(seconds=rank_timeout)
    group = None if simulate else find_group(tp, place, timeout=limit)
    tp = tp if tp is not None else 1 if group is None else group.size()
    passes = passes_for(pipeline, tp)
    if tp > 1 and not any(isinstance(current, PlanSharding) for current in passes):
        raise UsageError(
            f"The pipeline shards nothing, and tp={tp} ranks were asked for",
            hint="Put plan-sharding and the passes behind it into the pipeline",
        )
    with starting(tp, group, place, simulate=simulate, timeout=rank_timeout) as load:
        captured = captured_of(model, dtype=dtype_of(dtype))
        weights = weights_of(captured, model, random_weights)
        graph, stages = run_passes(captured.graph, passes)
        longest = max_seq_len or captured.config.max_position_embeddings
        programs = _programs(backend, captured.graph, passes, longest, max_batch or 1)
        ranks = load(rank_modules(graph), weights, captured.rotary.fresh)
        if programs is not None:
            ranks = MachineRanks(ranks, programs, captured.rotary.fresh)
        return CompiledModel(
            captured,
            graph,
            stages,
            ranks,
            programs=programs,
            generation_config=generation_config_of(captured, weights),
            max_seq_len=max_seq_len,
            max_batch=max_batch,
            device=place,
        )


def _check_machine(place: torch.device, simulate: bool) -> None:
    """The reference machine is one process on the CPU."""
    if is_torchelastic_launched() and not simulate:
        raise UnsupportedError(
            "The reference machine under torchrun",
            expected="one process, which runs all ranks",
            hint="Start it without torchrun, with the tp that you want",
        )
    if place.type != "cpu":
        raise UnsupportedError(f"The reference machine on {place}", expected="the CPU")


def _programs(
    backend: str, captured: fx.GraphModule, passes: Sequence[Pass], longest: int, batch: int
) -> StepPrograms | None:
    """What a machine runs; modules need none."""
    if backend != "reference":
        return None
    return StepPrograms(captured, passes, target_of("cpu"), longest, batch)


def _check_backend(backend: str) -> None:
    if backend in PLANNED:
        raise UnsupportedError(
            f"backend={backend!r}", expected="torch or reference, the backends so far"
        )
    if backend not in BACKENDS:
        raise UsageError(
            f"There is no backend {backend!r}", hint=did_you_mean(str(backend), BACKENDS)
        )


def _check_limit(name: str, limit: int | None) -> None:
    whole = isinstance(limit, int) and not isinstance(limit, bool)
    if limit is not None and (not whole or limit < 1):
        raise UsageError(f"{name}={limit!r} means nothing", expected="a number, 1 or more")


def _check_seconds(rank_timeout: float) -> None:
    number = isinstance(rank_timeout, int | float) and not isinstance(rank_timeout, bool)
    if not number or not 0 < rank_timeout <= _LONGEST_S:
        raise UsageError(
            f"rank_timeout={rank_timeout!r} is no time to wait",
            expected=f"seconds, more than 0 and at most {_LONGEST_S:,}",
        )


def _device_of(device: torch.device | str | None) -> torch.device:
    try:
        found = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise UsageError(f"There is no device {device!r}", expected="cpu or cuda") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"There is no GPU for device={str(device)!r}",
            hint="Leave device out to run on the CPU",
        )
    if found.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device={str(device)!r}", expected="cpu or cuda")
    return found


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
