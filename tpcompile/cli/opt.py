"""`tpcompile opt`: run passes on the text of a graph."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    choice,
    number,
)
from tpcompile.cli.compiling import progress, run_pipeline
from tpcompile.cli.graph_file import add_graph_file, read_graph_file
from tpcompile.cli.printing import (
    add_output_option,
    check_diff,
    check_output,
    finished,
    printer_of,
    renderer,
    shown_names,
)
from tpcompile.errors import UsageError

if TYPE_CHECKING:
    from tpcompile.ir.checker import Problem
    from tpcompile.passes import Instrument

_EXAMPLES = """\
  tpcompile dump preset:tiny-qwen3 --tp 2 --stop-after kv-heads -o graph.txt
  tpcompile opt graph.txt -p "vocab-parallel,insert-collectives,fuse-qkv"
  tpcompile opt graph.txt -p fuse-qkv --diff
  tpcompile opt graph.txt --verify-only
  tpcompile dump preset:tiny-qwen3 --tp 2 --stop-after capture | tpcompile opt - -p standard --tp 2
  tpcompile opt reproducer.txt                    the passes that the file names

The exit status is 0 if the graph is valid before and after the passes, 1 if it
is not, 2 for bad input."""


def _add_arguments(parser: Parser) -> None:
    add_graph_file(parser)
    parser.add_argument(
        "--tp", metavar="N", type=number(1, "the number of ranks"),
        help="number of ranks for plan-sharding; default: that of the graph",
    )  # fmt: skip
    parser.add_argument(
        "--verify-only", action="store_true", help="check the graph, and run and print nothing"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--print-ir-after", metavar="all|NAME", help="show the graph after this pass, or after all"
    )
    shown.add_argument("--diff", action="store_true", help="show a diff for each pass")
    parser.add_argument(
        "--format", type=choice("text", "json", "dot"), metavar="F", default="text",
        help="text, json or dot (Graphviz); default: text",
    )  # fmt: skip
    parser.add_argument("--no-origin", action="store_true", help="leave out the origins of lines")
    parser.add_argument(
        "--timing", action="store_true", help="print a table of pass times to stderr"
    )
    add_output_option(parser)


def _run(args: argparse.Namespace) -> Result:
    check_output(args.output)
    if args.verify_only and (args.pipeline or args.diff or args.print_ir_after):
        raise UsageError("--verify-only runs no passes", hint="Leave out the other options")
    if args.diff:
        check_diff(args.format)
    with progress() as say:
        say(f"reading {args.file}")
        found, pipeline = read_graph_file(args)
        from tpcompile.ir.parse import text_problems

        problems = text_problems(found)
        if problems:
            return Result(_listed(args.file, problems), 1)
        if args.verify_only:
            count = len(found.graph.graph.nodes)
            return Result(f"{args.file}: the graph is valid ({count} nodes)\n")
        from tpcompile.ir.info import info_of
        from tpcompile.passes import for_ranks, parse_pipeline

        passes = parse_pipeline(pipeline) if pipeline else []
        passes = for_ranks(passes, args.tp or info_of(found.graph).tp)
        shown: list[str] = []
        render = renderer(args.format, origins=not args.no_origin)
        instruments: list[Instrument] = []
        if args.diff or args.print_ir_after:
            names = shown_names(args.print_ir_after, passes)
            instruments.append(printer_of(args, render, names, shown))
        graph = run_pipeline(args, found.graph, passes, instruments, say)
        return finished(args, shown if instruments else [render(graph)])


def _listed(file: Path, problems: list[Problem]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    listed = "".join(f"  {problem}\n" for problem in problems)
    return f"{file}: {count}\n{listed}"


COMMAND = Command("run passes on the text of a graph", _EXAMPLES, _add_arguments, _run)
