"""`tpcompile compare`: compare the compiled model with Hugging Face eager, value by value."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_model_arguments,
    add_threads_argument,
    backend_name,
    choice,
    json_text,
    number,
    workers_of,
)
from tpcompile.cli.compiling import check_runnable, own_threads, passes_of, progress
from tpcompile.cli.numbers import lengths, relative_error
from tpcompile.errors import UsageError

if TYPE_CHECKING:
    from tpcompile.compare.comparison import Comparison
    from tpcompile.passes import Pass

_PROGRAM = "decode{spans=2,block=8}"
"""The default pipeline for programs. Its blocks are small, so short sequences have several."""

_EXAMPLES = """\
  tpcompile compare ./my-checkpoint --tp 2
  tpcompile compare preset:tiny-qwen3 --tp 4 --random-weights 0
  tpcompile compare preset:tiny-qwen2 --tp 3 --random-weights 0 --dtype bfloat16
  tpcompile compare ./my-checkpoint --tp 2 --lengths 1,64 --all
  tpcompile compare ./my-checkpoint --tp 2 --backend native --steps 4
  tpcompile compare ./my-checkpoint --tp 2 --threads 2
  tpcompile compare preset:tiny-qwen3 --tp 3 --random-weights 0 \\
      --backend reference --json

First comes what is proved for all inputs: passes after which the graph computes
what was captured, with the rewrites that they use, and the program. In --json
it is the key proof. The rest is measured: the capture, rounding, and executors.

The torch backend runs prompts of random tokens, then decodes some tokens one by
one, with a KV cache on each side. The other backends run decode steps on filled
KV caches: on eager, on the torch module and in the program. They compare the
three after every instruction group. The program always runs on the reference
machine. With another backend it also runs there: instruction by instruction,
to compare every stored value, and then as one launch, which must give the same
bits. Their default pipeline is decode{spans=2,block=8}.
All sides of a mixture of experts follow eager's choices. Choices of their own
that differ are listed first; the error of the router's logits may explain them.
The exit status is 0 if all values agree, 1 if one does not, 2 for bad input."""


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser, timing=False, weights=True)
    parser.add_argument(
        "--against",
        metavar="A",
        type=choice("eager"),
        default="eager",
        help="model to compare with: eager",
    )
    parser.add_argument(
        "--backend",
        metavar="B",
        type=backend_name,
        default="auto",
        help="auto, torch: one module per rank; reference: also the program, on the reference "
        "machine; native: also on native threads; triton: also as a Triton kernel; default: auto",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="with torch, run all ranks in this process; default: one process per rank",
    )
    parser.add_argument(
        "--lengths",
        metavar="L",
        type=lengths,
        default=(9, 17, 1),
        help="tokens of each sequence in the batch; for programs, including the first new one; "
        "default: 9,17,1",
    )
    parser.add_argument("--seed", metavar="S", type=number(0, "the seed"), default=0,
                        help="seed of the random tokens; default: 0")  # fmt: skip
    parser.add_argument(
        "--tolerance",
        metavar="E",
        type=relative_error,
        help="largest relative error allowed; default: depends on the dtype, 1e-5 for float32",
    )
    add_threads_argument(parser)
    _add_program_arguments(parser)
    parser.add_argument(
        "--all", action="store_true", help="show every value, not only the worst of each layer"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_program_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("with a backend that runs programs, such as native")
    group.add_argument("--steps", metavar="K", type=number(1, "the number of steps"),
                       help="number of tokens to decode; default: 2")  # fmt: skip
    group.add_argument("--workers", metavar="W", type=number(1, "the number of workers"),
                       help="parts that the work of a rank is split into; default: "
                       "--threads, or else 4")  # fmt: skip
    group.add_argument(
        "--lowering",
        metavar="L",
        type=choice("heads", "rows"),
        help="heads: whole heads in each instruction; rows: blocks of rows; default: heads",
    )


def _run(args: argparse.Namespace) -> Result:
    check_runnable(args)
    modules = args.backend in ("auto", "torch")
    if modules:
        for name in ("steps", "workers", "lowering"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name} applies to programs only", hint="Add --backend reference"
                )
    elif args.simulate:
        raise UsageError(
            "--simulate applies to the torch backend only",
            hint="Leave it out: programs always run all ranks in this process",
        )
    elif args.pipeline is None:
        args.pipeline = _PROGRAM
    with progress() as say, own_threads(args):
        passes = passes_of(args)
        from tpcompile.options import check_shards

        check_shards(passes, args.tp)
        say(f"comparing {args.model}")
        comparison = (_modules if modules else _program)(args, passes)
    text = json_text(comparison.to_json()) if args.json else comparison.table(args.all)
    return Result(text, status=0 if comparison.ok else 1)


def _modules(args: argparse.Namespace, passes: list[Pass]) -> Comparison:
    from tpcompile.compare.model import compare_with_eager
    from tpcompile.options import dtype_of, rounds_inputs, scheme_of

    return compare_with_eager(
        args.model,
        passes,
        dtype=dtype_of(args.dtype),
        scheme=scheme_of(args.weights, args.head),
        rounds=rounds_inputs(args.activations),
        random_weights=args.random_weights,
        adapter=args.adapter,
        lengths=args.lengths,
        seed=args.seed,
        tolerance=args.tolerance,
        simulate=args.simulate,
        threads=args.threads,
    )


def _program(args: argparse.Namespace, passes: list[Pass]) -> Comparison:
    from tpcompile.compare.program import Batch, compare_program
    from tpcompile.options import dtype_of, rounds_inputs, scheme_of

    return compare_program(
        args.model,
        passes,
        Batch(args.lengths, args.steps or 2, args.seed),
        workers=workers_of(args) or 4,
        lowering=args.lowering or "heads",
        backend=args.backend,
        dtype=dtype_of(args.dtype),
        scheme=scheme_of(args.weights, args.head),
        rounds=rounds_inputs(args.activations),
        random_weights=args.random_weights,
        adapter=args.adapter,
        tolerance=args.tolerance,
    )


COMMAND = Command(
    "compare the compiled model with Hugging Face eager, value by value",
    _EXAMPLES,
    _add_arguments,
    _run,
)
