"""`tpcompile explore`: everything about a compilation as one page."""

from __future__ import annotations

import argparse
import re
import sys
import webbrowser
from pathlib import Path

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_model_arguments,
    add_threads_argument,
    model_options,
    number,
    workers_of,
)
from tpcompile.cli.compiling import own_threads, progress
from tpcompile.errors import UsageError
from tpcompile.presets import check_model_name

_EXAMPLES = """\
  tpcompile explore preset:tiny-qwen3 --tp 4 -o report.html --open
  tpcompile explore preset:qwen3-0.6b --tp 2 --target h200 -o report.html
  tpcompile explore preset:tiny-qwen3 --tp 2 --beside 4 -o report.html
  tpcompile explore preset:tiny-qwen3 --tp 2 --beside "2:standard{block=16}"
  tpcompile explore build/demo --tp 2 --compare -o report.html
  tpcompile explore preset:tiny-qwen3 --target cpu --measured -o report.html
  tpcompile explore build/demo --compare --measured --threads 2

The page is one file that opens from disk and needs no network. It shows the
passes, each stage as text and as a drawing, the expression of each value and
what passes did to it, who holds what, the schedule of a decode step, and why
each value is as it is."""


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser, timing=False, weights=True)
    parser.add_argument(
        "-o", "--output", metavar="FILE.html", type=Path, default=Path("report.html"),
        help="file to write; default: report.html",
    )  # fmt: skip
    parser.add_argument("--open", action="store_true", help="open the page in the default browser")
    parser.add_argument(
        "--beside", metavar="N[:PIPELINE]", action="append", type=_beside, default=[],
        help="another number of ranks, or pipeline, to look at side by side; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also compare every value with Hugging Face eager, in fp32 and bf16",
    )
    add_threads_argument(parser, "for --compare and --measured, ")
    group = parser.add_argument_group("the schedule of a decode step")
    group.add_argument(
        "--target",
        metavar="T",
        help="cpu, a100, h100, h200, b200, or a file; default: this machine, its GPU if it has one",
    )
    group.add_argument("--policy", metavar="P", help="scheduling policy; default: by target")
    group.add_argument("--lowering", metavar="L", help="heads, rows or auto; default: auto")
    for option, name, subject, help in (
        ("--workers", "W", "the number of workers", "workers per rank; default: the target's"),
        ("--batch", "B", "the batch size", "number of sequences; default: 1"),
        ("--context", "C", "the context", "sequence length of the time estimate; default: 1024"),
    ):
        group.add_argument(option, metavar=name, type=number(1, subject), help=help)
    group.add_argument(
        "--measured",
        action="store_true",
        help="also run steps on this machine's CPU, with random weights, and show their times",
    )


def _beside(text: str) -> tuple[int, str | None]:
    match = re.fullmatch(r"([1-9]\d*)(?::(.+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"must be a number of ranks, or with a pipeline, as in 2:standard, got {text!r}"
        )
    return int(match[1]), match[2]


def _run(args: argparse.Namespace) -> Result:
    check_model_name(args.model)
    if args.random_weights is not None and not args.compare:
        raise UsageError(
            "--random-weights applies to --compare only", hint="Add --compare, or leave it out"
        )
    if args.threads is not None and not (args.compare or args.measured):
        raise UsageError(
            "--threads applies to --compare and --measured only",
            hint="Choose the workers of a target: --workers",
        )
    workers = workers_of(args) if args.measured else args.workers
    with progress() as say, own_threads(args):
        from tpcompile.frontend.extras import import_without_extras
        from tpcompile.inspect.files import check_file

        check_file(args.output)
        if args.alone:
            import_without_extras()
        from tpcompile.exploring import explore

        exploration = explore(
            args.model,
            beside=args.beside,
            target=args.target,
            policy=args.policy,
            workers=workers,
            batch=args.batch or 1,
            context=args.context,
            lowering=args.lowering,
            measured=args.measured,
            compare=args.compare,
            random_weights=args.random_weights,
            adapter=args.adapter,
            threads=args.threads,
            say=say,
            **model_options(args),
        )
        say(f"writing {args.output}")
        exploration.write(args.output)
    size = args.output.stat().st_size / 1e6
    sys.stderr.write(f"wrote {args.output} ({size:.1f} MB)\n")
    if args.open and not webbrowser.open(args.output.resolve().as_uri()):
        sys.stderr.write("warning: there is no browser to open the page with\n")
    return Result("")


COMMAND = Command("show a compilation as one page in a browser", _EXAMPLES, _add_arguments, _run)
