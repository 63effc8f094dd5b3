"""`tpcompile compare`: the compiled model beside Hugging Face eager, value by value."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_model_arguments,
    choice,
    json_text,
    number,
)
from tpcompile.cli.compiling import passes_of, progress
from tpcompile.cli.numbers import lengths, relative_error
from tpcompile.errors import UsageError

if TYPE_CHECKING:
    from tpcompile.compare.comparison import Comparison
    from tpcompile.passes import Pass

_PROGRAM = "decode{spans=2,block=8}"
"""Blocks so small that short sequences have several."""

_EXAMPLES = """\
  tpcompile compare ./my-checkpoint --tp 2
  tpcompile compare preset:tiny-qwen3 --tp 4 --random-weights 0
  tpcompile compare preset:tiny-qwen2 --tp 3 --random-weights 0 --dtype bfloat16
  tpcompile compare ./my-checkpoint --tp 2 --lengths 1,64 --all
  tpcompile compare ./my-checkpoint --tp 2 --backend reference --steps 4
  tpcompile compare preset:tiny-qwen3 --tp 3 --random-weights 0 \\
      --backend reference --json

torch: prompts of random tokens, then some tokens one by one through the KV
caches of both. reference: steps behind filled KV caches, on eager, on the torch
module and in the program of the decode step, side by side after every
instruction group; its pipeline is decode{spans=2,block=8} if -p gives no other.
The exit status is 0 if all values agree, 1 if one does not, 2 for bad input."""


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser, timing=False)
    parser.add_argument(
        "--against", metavar="A", type=choice("eager"), default="eager", help="eager"
    )
    parser.add_argument(
        "--backend",
        metavar="B",
        type=choice("auto", "torch", "reference"),
        default="auto",
        help="torch: one module a rank; reference: the program, too, on the reference machine; "
        "default: torch",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="with torch, keep all ranks in this process; default: each is a process of its own",
    )
    parser.add_argument(
        "--lengths",
        metavar="L",
        type=lengths,
        default=(9, 17, 1),
        help="tokens of each sequence of the batch, with reference as far as the first new one; "
        "default: 9,17,1",
    )
    parser.add_argument("--seed", metavar="S", type=number(0, "a seed"), default=0,
                        help="of the random tokens; default: 0")  # fmt: skip
    parser.add_argument(
        "--tolerance",
        metavar="E",
        type=relative_error,
        help="largest relative error; default: by the dtype, 1e-5 for float32",
    )
    _add_program_arguments(parser)
    parser.add_argument("--all", action="store_true", help="show every value, not the worst")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def _add_program_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("with --backend reference")
    group.add_argument("--steps", metavar="K", type=number(1, "a number of steps"),
                       help="tokens to decode; default: 2")  # fmt: skip
    group.add_argument("--workers", metavar="W", type=number(1, "a number of workers"),
                       help="into how many parts work is cut on each rank; default: 4")  # fmt: skip
    group.add_argument(
        "--lowering",
        metavar="L",
        type=choice("heads", "rows"),
        help="whole heads in each instruction, or blocks of rows; default: heads",
    )


def _run(args: argparse.Namespace) -> Result:
    if args.backend != "reference":
        for name in ("steps", "workers", "lowering"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name} is for programs", hint="Add --backend reference")
    elif args.simulate:
        raise UsageError(
            "--simulate is for the torch backend",
            hint="Leave it out: the reference machine always runs all ranks in this process",
        )
    elif args.pipeline is None:
        args.pipeline = _PROGRAM
    with progress() as say:
        passes = passes_of(args)
        if args.tp > 1 and all(current.name != "plan-sharding" for current in passes):
            raise UsageError(
                "The pipeline shards nothing", hint="Put plan-sharding into it, or leave out -p"
            )
        say(f"comparing {args.model}")
        found = (_program if args.backend == "reference" else _modules)(args, passes)
    text = json_text(found.to_json()) if args.json else found.table(args.all)
    return Result(text, status=0 if found.ok else 1)


def _modules(args: argparse.Namespace, passes: list[Pass]) -> Comparison:
    from tpcompile.api import dtype_of
    from tpcompile.compare.model import compare_with_eager

    return compare_with_eager(
        args.model,
        passes,
        dtype=dtype_of(args.dtype),
        random_weights=args.random_weights,
        lengths=args.lengths,
        seed=args.seed,
        tolerance=args.tolerance,
        simulate=args.simulate,
    )


def _program(args: argparse.Namespace, passes: list[Pass]) -> Comparison:
    from tpcompile.api import dtype_of
    from tpcompile.compare.program import Batch, compare_program

    return compare_program(
        args.model,
        passes,
        Batch(args.lengths, args.steps or 2, args.seed),
        workers=args.workers or 4,
        lowering=args.lowering or "heads",
        dtype=dtype_of(args.dtype),
        random_weights=args.random_weights,
        tolerance=args.tolerance,
    )


COMMAND = Command(
    "run the compiled model beside Hugging Face eager, value by value",
    _EXAMPLES,
    _add_arguments,
    _run,
)
