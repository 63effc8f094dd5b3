"""The steps from arguments to a graph, shared by commands. Cheap checks run first."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tpcompile.cli.command import FailedError, model_options
from tpcompile.cli.wording import with_options
from tpcompile.errors import UsageError
from tpcompile.presets import check_model_name

if TYPE_CHECKING:
    from torch import fx

    from tpcompile.frontend import Captured
    from tpcompile.passes import Instrument, Pass
    from tpcompile.runtime.model import CompiledModel

Say = Callable[[str], None]


@contextlib.contextmanager
def plain_warnings(args: argparse.Namespace) -> Iterator[None]:
    """Show the warnings of the body without their source location."""

    names = tuple(vars(args))

    def show(message: Warning | str, *_: object, **__: object) -> None:
        sys.stderr.write(f"warning: {with_options(str(message), names, names)}\n")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def check_runnable(args: argparse.Namespace) -> None:
    """Refuse an invalid model name, and a preset without random weights."""
    check_model_name(args.model)
    if args.random_weights is None and args.model.startswith("preset:"):
        raise UsageError(
            f"{args.model} is a configuration without weights",
            hint="Pass a checkpoint, or --random-weights SEED for random weights",
        )


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model; report a missing model before a missing tokenizer."""
    from tpcompile.frontend import config_of
    from tpcompile.runtime.text import tokenizer_of

    config_of(model)
    return tokenizer_of(model)


def passes_of(args: argparse.Namespace) -> list[Pass]:
    """Return the passes of `-p`, or the standard pipeline, for `--tp` ranks."""
    check_model_name(args.model)
    from tpcompile.options import passes_for

    return passes_for(args.pipeline, args.tp, args.kv, args.experts)


def warn_unsharded(args: argparse.Namespace, passes: Sequence[Pass]) -> None:
    """Warn if `--tp` is above 1 but the pipeline does not shard the graph."""
    from tpcompile.options import shards

    if args.tp > 1 and not shards(passes):
        sys.stderr.write(
            f"warning: without plan-sharding in the pipeline, --tp {args.tp} has no effect\n"
        )


def compile_model(args: argparse.Namespace, say: Say, **more: Any) -> CompiledModel:
    """Compile the model for a command that runs it; `more` are further options of `compile`."""
    say(f"compiling {args.model}")
    from tpcompile.api import compile
    from tpcompile.runtime.generation import without_sampling

    _refuse_gpus_without_torchrun(args)
    with plain_warnings(args):
        model = compile(
            args.model,
            backend=args.backend,
            device=args.device,
            max_seq_len=args.max_seq_len,
            random_weights=args.random_weights,
            threads=args.threads,
            adapter=args.adapter,
            **model_options(args),
            **more,
        )
    if args.generation_config == "none":
        model.generation_config = without_sampling(model.generation_config)
    return model


@contextlib.contextmanager
def own_threads(args: argparse.Namespace) -> Iterator[None]:
    """Run the body with `--threads` of torch's threads, at most one per core by default."""
    import torch

    from tpcompile.backends.torch_threads import torch_threads
    from tpcompile.cores import cores
    from tpcompile.options import check_threads, device_of

    check_threads(args.threads, device_of(getattr(args, "device", None)))
    with torch_threads(args.threads or min(torch.get_num_threads(), cores())):
        yield


def _refuse_gpus_without_torchrun(args: argparse.Namespace) -> None:
    """Refuse several ranks on GPUs without a launcher, and say how to start them."""
    from tpcompile.options import device_of
    from tpcompile.runtime.ranks.launched import has_launcher

    if args.tp in (None, 1) or has_launcher() or device_of(args.device).type == "cpu":
        return
    command = shlex.join(["-m", "tpcompile", *args.words])
    raise UsageError(
        f"On GPUs each of the {args.tp} ranks needs a process that torchrun starts",
        hint=f"Run: torchrun --nproc-per-node {args.tp} {command}",
    )


def lower_model(
    args: argparse.Namespace, passes: Sequence[Pass], instruments: Sequence[Instrument], say: Say
) -> fx.GraphModule:
    """Capture the model and run the passes.

    With `--timing` or on a terminal, a summary of the times goes to stderr.
    """
    return run_pipeline(args, capture_model(args, say).graph, passes, instruments, say)


def capture_model(args: argparse.Namespace, say: Say, config: Any = None) -> Captured:
    """Capture the model, and report the time with `--timing` or on a terminal.

    A `config` is captured instead of the configuration of the model.
    If the process runs only this command, transformers' extras are not imported.
    """
    started = time.perf_counter()
    say(f"capturing {args.model}")
    from tpcompile.frontend import capture
    from tpcompile.frontend.extras import import_without_extras
    from tpcompile.options import dtype_of, rounds_inputs, scheme_of

    scheme, rounds = scheme_of(args.weights, args.head), rounds_inputs(args.activations)
    if args.alone:
        import_without_extras()
    model = config or args.model
    captured = capture(model, dtype=dtype_of(args.dtype), scheme=scheme, rounds=rounds)
    if args.adapter is not None:
        from tpcompile.runtime.weights import adapter_for

        adapter_for(captured, args.adapter)  # raises unless it fits
    if args.timing or sys.stderr.isatty():
        sys.stderr.write(f"captured in {time.perf_counter() - started:.1f} s\n")
    return captured


def run_pipeline(
    args: argparse.Namespace,
    graph: fx.GraphModule,
    passes: Sequence[Pass],
    instruments: Sequence[Instrument],
    say: Say,
    **more: Any,
) -> fx.GraphModule:
    """Run the passes on a graph and return the final one; `more` are options of `run_passes`.

    With `--timing` or on a terminal, a summary of the times goes to stderr.
    """
    from tpcompile.inspect.instruments import PassLog
    from tpcompile.rewriting.manager import FailedPassError, run_passes
    from tpcompile.rewriting.reproducer import write_reproducer

    def follow(name: str, gm: fx.GraphModule, stats: object) -> None:
        say(f"finished {name}")

    log = PassLog()
    options = {"on_failure": write_reproducer, **more}
    try:
        graph, _ = run_passes(graph, passes, [log, follow, *instruments], **options)
    except FailedPassError as error:
        raise FailedError(error) from error
    if args.timing:
        sys.stderr.write(log.table())
    for name, reason in log.unproved.items():
        sys.stderr.write(f"not proved: {name}: {reason}\n")
    if args.timing or sys.stderr.isatty():
        spent = sum(row.ms + row.check_ms + row.proof_ms for row in log.rows)
        sys.stderr.write(f"passes and checks took {spent:.0f} ms\n")
        if log.rows and not log.unproved:
            sys.stderr.write(f"{proof_of(more.get('first', 'capture'))}\n")
    return graph


def proof_of(first: str) -> str:
    """Return the sentence for a pipeline whose passes are all proved."""
    start = "captured graph" if first == "capture" else "graph that was read"
    return f"proved equal to the {start}, by expressions and declared rewrites"


@contextlib.contextmanager
def progress(first: str = "starting torch") -> Iterator[Say]:
    """Show a spinner with the current phase on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(first) as status:
        yield lambda text: status.update(escape(text))
