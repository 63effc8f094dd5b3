"""`tpcompile compare`: the compiled model beside Hugging Face eager, value by value."""

from __future__ import annotations

import argparse

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

_EXAMPLES = """\
  tpcompile compare ./my-checkpoint --tp 2
  tpcompile compare preset:tiny-qwen3 --tp 4 --random-weights 0
  tpcompile compare preset:tiny-qwen2 --tp 3 --random-weights 0 --dtype bfloat16
  tpcompile compare ./my-checkpoint --tp 2 --lengths 1,64 --all

Then some tokens are decoded one by one through the KV caches of both.
The exit status is 0 if all values agree, 1 if one does not, 2 for bad input."""


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser, timing=False)
    parser.add_argument(
        "--against", metavar="A", type=choice("eager"), default="eager", help="eager"
    )
    parser.add_argument(
        "--backend",
        metavar="B",
        type=choice("auto", "torch"),
        default="auto",
        help="torch: one module a rank",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="keep all ranks in this process; default: each is a process of its own",
    )
    parser.add_argument(
        "--lengths",
        metavar="L",
        type=lengths,
        default=(9, 17, 1),
        help="tokens of each sequence of the batch; default: 9,17,1",
    )
    parser.add_argument("--seed", metavar="S", type=number(0, "a seed"), default=0,
                        help="of the random tokens; default: 0")  # fmt: skip
    parser.add_argument(
        "--tolerance",
        metavar="E",
        type=relative_error,
        help="largest relative error; default: by the dtype, 1e-5 for float32",
    )
    parser.add_argument("--all", action="store_true", help="show every value, not the worst")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def _run(args: argparse.Namespace) -> Result:
    with progress() as say:
        passes = passes_of(args)
        if args.tp > 1 and all(current.name != "plan-sharding" for current in passes):
            raise UsageError(
                "The pipeline shards nothing", hint="Put plan-sharding into it, or leave out -p"
            )
        from tpcompile.api import dtype_of
        from tpcompile.runtime.compare import compare_with_eager

        say(f"comparing {args.model}")
        found = compare_with_eager(
            args.model,
            passes,
            dtype=dtype_of(args.dtype),
            random_weights=args.random_weights,
            lengths=args.lengths,
            seed=args.seed,
            tolerance=args.tolerance,
            simulate=args.simulate,
        )
    text = json_text(found.to_json()) if args.json else found.table(args.all)
    return Result(text, status=0 if found.ok else 1)


COMMAND = Command(
    "run the compiled model beside Hugging Face eager, value by value",
    _EXAMPLES,
    _add_arguments,
    _run,
)
