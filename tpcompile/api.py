"""`compile` and `capture`: options select the pipeline and the backend of a runnable model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.foreign import refuse_foreign
from tpcompile.frontend import capture as captured_of
from tpcompile.frontend.positions import longest_of
from tpcompile.libraries import library_errors
from tpcompile.options import (
    check_limit,
    check_shards,
    check_threads,
    device_of,
    dtype_of,
    passes_for,
    rounds_inputs,
    scheme_of,
)
from tpcompile.passes import Pass, run_passes
from tpcompile.passes.pipeline import DecodeFork
from tpcompile.plugins import load_plugins
from tpcompile.rewriting.reproducer import write_reproducer
from tpcompile.runtime.backend import BackendChoice
from tpcompile.runtime.generation import generation_config_of
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.programs import ProgramOptions
from tpcompile.runtime.ranks.launched import agreed_threads, find_group
from tpcompile.runtime.ranks.rank import rank_modules
from tpcompile.runtime.ranks.start import starting
from tpcompile.runtime.weights import weights_of
from tpcompile.serving.batch import generate_batch

_LONGEST_S = 7 * 24 * 3600


@library_errors()
@refuse_foreign
def capture(
    model: Any,
    *,
    dtype: torch.dtype | str | None = None,
    weights: str | None = None,
    head: str | None = None,
    activations: str = "16",
) -> fx.GraphModule:
    """Return the raw graph of MODEL, typed, on one rank: the input of the first pass."""
    scheme, rounds = scheme_of(weights, head), rounds_inputs(activations)
    return captured_of(model, dtype=dtype_of(dtype), scheme=scheme, rounds=rounds).graph


@library_errors()
@refuse_foreign
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
    threads: int | None = None,
    weights: str | None = None,
    head: str | None = None,
    activations: str = "16",
    kv: str | None = None,
    experts: str = "auto",
    adapter: str | Path | None = None,
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

    `max_seq_len` (default: the configuration's) and `max_batch` limit the size of the KV cache. A
    `max_seq_len` above the limit of the configuration's positions is refused. `pipeline` is a pass
    pipeline as text or as a sequence of passes (default: the standard pipeline). `random_weights`
    is a seed for the weights of a model that has none. A rank that does not respond for
    `rank_timeout` seconds is considered dead.

    Backends that run programs also take the `target` that programs are scheduled for (default:
    the machine of `device`), the scheduling `policy`, the `lowering` ("heads", "rows" or "auto")
    and the number of attention `spans`.

    `threads` is the number of workers of a rank for programs, also instead of those of `target`,
    and of torch's threads for modules. By default the ranks of a machine share the cores that this
    process may use, and a target file has its own number of workers.

    `weights` quantizes the linears of the layers and the head while they are loaded: "int8" or
    "int4", with a scale per group of 64 columns; "int4:32" sets the size of a group, and "int8:row"
    gives each row one scale. `head` does the same for the head: "int8" (default), "int4" or "keep".
    A tied head is untied, unless it is kept; the embedding is not quantized.

    With `activations="int8"`, linears with weights in 8 to 4 bits round their inputs to int8, with
    a scale per token and block of columns, which is faster on some CPUs and less exact. Other
    linears, and "16", leave them in the model's dtype.

    With `kv="int8"`, the KV cache stores keys, after their rotation, and values in int8, with a
    scale per token and head. By default it stores them in the model's dtype.

    `experts` says how ranks share a mixture of experts: with "tp" each rank has a part of every
    expert, with "ep" it has whole experts. "auto" chooses the plan whose busiest rank is expected
    to read fewer bytes of experts for a token.

    `adapter` is the directory of a LoRA adapter of peft. Each rank merges its part of it into its
    part of the weights while they are loaded, before `weights` quantizes them.
    """
    options = dict(locals())
    load_plugins()
    scheme, rounds = scheme_of(weights, head), rounds_inputs(activations)
    check_limit("max_seq_len", max_seq_len)
    check_limit("max_batch", max_batch)
    check_limit("spans", spans)
    _check_seconds(rank_timeout)
    place = device_of(device)
    check_threads(threads, place)
    how = ProgramOptions(target, policy, lowering, spans)
    chosen = BackendChoice(backend, place, how)
    limit = timedelta(seconds=rank_timeout)
    group = None if simulate else find_group(tp, place, timeout=limit)
    tp = tp if tp is not None else 1 if group is None else group.size()
    share = threads if threads or group is None else agreed_threads(group, place)
    passes = passes_for(pipeline, tp, kv, experts)
    check_shards(passes, tp)
    inside = simulate or (tp == 1 and not isolate)
    with starting(tp, group, place, inside=inside, timeout=rank_timeout, threads=share) as load:
        captured = captured_of(model, dtype=dtype_of(dtype), scheme=scheme, rounds=rounds)
        longest = longest_of(captured.config, max_seq_len)
        source = weights_of(captured, model, random_weights, adapter)
        fork = DecodeFork(passes, write_reproducer)
        graph, stages = run_passes(
            captured.graph, passes, [fork], on_failure=write_reproducer, prover=fork.prover
        )
        workers = share if target is None else threads
        steps = chosen.decide(fork, longest, max_batch or 1, workers)
        described = rank_modules(graph, steps.executor)
        modules = load(described, source, captured.rotary.fresh)
        ranks = steps.ranks(modules, captured.rotary.fresh)
        compiled = CompiledModel(
            captured,
            graph,
            stages,
            ranks,
            modules=described,
            generation_config=generation_config_of(captured, source),
            max_seq_len=max_seq_len,
            max_batch=max_batch,
            device=place,
        )
    compiled.batches, compiled.explorer = generate_batch, _explore
    if group is None:
        compiled.made_by = Recipe(options)
    return compiled


def _explore(model: CompiledModel, path: str | Path, **options: Any) -> None:
    from tpcompile.exploring import explore_compiled  # imports much that other models do not need

    explore_compiled(model, path, **options)


class Recipe:
    """The arguments of `compile`, to compile the model again. It does not keep a model alive."""

    def __init__(self, options: dict[str, Any]) -> None:
        model = options.pop("model")
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else lambda: model
        self._options = options

    def __call__(self, **changes: Any) -> CompiledModel:
        """Compile the model again, with some arguments changed."""
        model = self._model()
        if model is None:
            raise UnsupportedError(
                "The model cannot be compiled again, because its weights are gone",
                hint="Keep the model that was passed to compile, or pass a directory",
            )
        return compile(model, **{**self._options, **changes})


def _check_seconds(rank_timeout: float) -> None:
    number = isinstance(rank_timeout, int | float) and not isinstance(rank_timeout, bool)
    if not number or not 0 < rank_timeout <= _LONGEST_S:
        raise UsageError(
            f"rank_timeout must be a number of seconds above 0 and at most {_LONGEST_S:,}, "
            f"got {rank_timeout!r}"
        )
