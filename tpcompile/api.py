"""`compile` and `capture`: options select the pipeline and the backend of a runnable model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import fx, nn

from tpcompile.dtypes import AUTO_DTYPE, DTYPE_NAMES, DTYPES
from tpcompile.errors import UnsupportedError, UsageError, did_you_mean
from tpcompile.frontend import capture as captured_of
from tpcompile.passes import Pass, default_pipeline, for_ranks, parse_pipeline, run_passes
from tpcompile.passes.pipeline import DecodeFork
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.plugins import load_plugins
from tpcompile.rewriting.reproducer import write_reproducer
from tpcompile.runtime.backend import BackendChoice
from tpcompile.runtime.generation import generation_config_of
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.programs import ProgramOptions
from tpcompile.runtime.ranks.launched import find_group
from tpcompile.runtime.ranks.rank import rank_modules
from tpcompile.runtime.ranks.start import starting
from tpcompile.runtime.weights import weights_of
from tpcompile.serving.batch import generate_batch

_LONGEST_S = 7 * 24 * 3600


def capture(model: Any, *, dtype: torch.dtype | str | None = None) -> fx.GraphModule:
    """Return the raw graph of MODEL, typed, on one rank: the input of the first pass."""
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
    target: str | None = None,
    policy: str | None = None,
    lowering: str | None = None,
    spans: int | None = None,
    isolate: bool = False,
) -> CompiledModel:
    """Compile a Hugging Face causal LM for `tp` ranks.

    `model` is a `PreTrainedModel`, a config, `preset:NAME`, a directory or a hub id. Under
    torchrun, or in an initialised process group, this process is one of the ranks, and `tp`
    defaults to the number of ranks. In a plain script `tp` defaults to 1, and the ranks of a
    larger `tp` run in worker processes. `isolate` runs a single rank in a worker too, so that this
    process outlives it. `simulate` keeps all ranks in this process.

    `backend` selects what runs decode steps. "torch" runs one torch module per rank. "native" runs
    the verified program on CPU threads, in a library that is built on first use. "reference"
    interprets the program instruction by instruction, slowly. "triton" runs it as one kernel on a
    GPU, or slowly in Triton's interpreter on the CPU. With all of them, torch modules run prompts.
    "auto" selects "native" on the CPU and "triton" on a GPU, or "torch" with a warning if that
    backend cannot run the model.

    `max_seq_len` (default: the configuration's) and `max_batch` limit the size of the KV cache.
    `pipeline` is a pass pipeline as text or as a sequence of passes (default: the standard
    pipeline). `random_weights` is a seed for the weights of a model that has none. A rank that
    does not respond for `rank_timeout` seconds is considered dead.

    Backends that run programs also take the `target` that programs are scheduled for (default:
    the machine of `device`), the scheduling `policy`, the `lowering` ("heads", "rows" or "auto")
    and the number of attention `spans`.
    """
    asked = dict(locals())
    load_plugins()
    check_limit("max_seq_len", max_seq_len)
    check_limit("max_batch", max_batch)
    check_limit("spans", spans)
    _check_seconds(rank_timeout)
    place = device_of(device)
    how = ProgramOptions(target, policy, lowering, spans)
    chosen = BackendChoice(backend, place, how)
    limit = timedelta(seconds=rank_timeout)
    group = None if simulate else find_group(tp, place, timeout=limit)
    tp = tp if tp is not None else 1 if group is None else group.size()
    passes = passes_for(pipeline, tp)
    check_shards(passes, tp)
    inside = simulate or (tp == 1 and not isolate)
    with starting(tp, group, place, inside=inside, timeout=rank_timeout) as load:
        captured = captured_of(model, dtype=dtype_of(dtype))
        weights = weights_of(captured, model, random_weights)
        fork = DecodeFork(passes, write_reproducer)
        graph, stages = run_passes(captured.graph, passes, [fork], on_failure=write_reproducer)
        longest = max_seq_len or captured.config.max_position_embeddings
        programs = chosen.programs(fork, longest, max_batch or 1)
        described = rank_modules(graph, chosen.executor)
        modules = load(described, weights, captured.rotary.fresh)
        ranks = chosen.ranks(modules, programs, captured.rotary.fresh)
        made = CompiledModel(
            captured,
            graph,
            stages,
            ranks,
            modules=described,
            generation_config=generation_config_of(captured, weights),
            max_seq_len=max_seq_len,
            max_batch=max_batch,
            device=place,
        )
    made.batches = generate_batch
    if group is None:
        made.made_by = Recipe(asked)
    return made


class Recipe:
    """The arguments of `compile`, to compile the model again. It does not keep a model alive."""

    def __init__(self, asked: dict[str, Any]) -> None:
        model = asked.pop("model")
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else lambda: model
        self._asked = asked

    def __call__(self, **changes: Any) -> CompiledModel:
        """Compile the model again, with some arguments changed."""
        model = self._model()
        if model is None:
            raise UnsupportedError(
                "The model cannot be compiled again, because its weights are gone",
                hint="Keep the model that was passed to compile, or pass a directory",
            )
        return compile(model, **{**self._asked, **changes})


def check_limit(name: str, limit: int | None) -> None:
    """Raise unless an optional limit is a positive int."""
    whole = isinstance(limit, int) and not isinstance(limit, bool)
    if limit is not None and (not whole or limit < 1):
        raise UsageError(f"{name} must be a positive int, got {limit!r}")


def _check_seconds(rank_timeout: float) -> None:
    number = isinstance(rank_timeout, int | float) and not isinstance(rank_timeout, bool)
    if not number or not 0 < rank_timeout <= _LONGEST_S:
        raise UsageError(
            f"rank_timeout must be a number of seconds above 0 and at most {_LONGEST_S:,}, "
            f"got {rank_timeout!r}"
        )


def device_of(device: torch.device | str | None) -> torch.device:
    """Return a device by name, the CPU by default. Raise unless it is there and supported."""
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device must be cpu or cuda, got {device!r}") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"device={str(device)!r} needs a GPU, but torch finds no GPU",
            hint="Omit it to run on the CPU",
        )
    if found.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device={str(device)!r} is not supported", expected="cpu or cuda")
    return found


def passes_for(pipeline: str | Sequence[Pass] | None, tp: int) -> list[Pass]:
    """Return the passes of `pipeline` (default: the standard pipeline) for `tp` ranks."""
    check_tp(tp)
    if pipeline is None:
        return default_pipeline(tp)
    if not isinstance(pipeline, str | Sequence):
        raise UsageError(
            f"pipeline must be text or a sequence of passes, got {type(pipeline).__name__}"
        )
    named = parse_pipeline(pipeline) if isinstance(pipeline, str) else pipeline
    passes = for_ranks(named, tp)
    for current in passes:
        if isinstance(current, PlanSharding) and current.tp != tp:
            raise UsageError(
                f"The pipeline plans for {current.tp} ranks",
                expected=f"{tp}, the requested tp",
                hint=f"Remove the option from plan-sharding{{tp={current.tp}}}",
            )
    return passes


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


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the floating-point dtype of this name, in any case, or None for "auto" and None."""
    if dtype is None or (isinstance(dtype, str) and dtype.lower() == AUTO_DTYPE):
        return None
    found: Any = dtype
    if isinstance(dtype, str):
        found = getattr(torch, DTYPE_NAMES.get(dtype.lower(), dtype.lower()), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        hint = did_you_mean(str(dtype), (*DTYPES, AUTO_DTYPE))
        raise UsageError(f"{dtype!r} is not a supported dtype", hint=hint)
    return found
