"""`tpcompile opt`: run passes on the text of a graph."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpcompile.cli.command import Command, Parser, Result, choice, number
from tpcompile.cli.compiling import progress, run_pipeline
from tpcompile.cli.graph_file import add_graph_file, name_of, read_graph_file
from tpcompile.cli.printing import (
    INPUT,
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
    from tpcompile.ir.problem import Problem
    from tpcompile.ir.text import GraphText
    from tpcompile.passes import Instrument, Pass

_EXAMPLES = """\
  tpcompile dump preset:tiny-qwen3 --tp 2 --stop-after kv-heads -o graph.txt
  tpcompile opt graph.txt -p "vocab-parallel,insert-collectives,fuse-qkv"
  tpcompile opt graph.txt -p fuse-qkv --diff
  tpcompile opt graph.txt --verify-only
  tpcompile dump preset:tiny-qwen3 --stop-after capture | tpcompile opt -
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
        "--print-ir-after",
        metavar="all|NAME",
        help="show the graph after this pass, after every pass (all), or as read (input)",
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
    _check_options(args)
    with progress() as say:
        say(f"reading {args.file}")
        graph_text, pipeline = read_graph_file(args)
        from tpcompile.ir.parse import text_problems

        problems = text_problems(graph_text)
        if args.verify_only:
            return _verdict(args.file, graph_text, problems)
        if problems:
            sys.stderr.write(_listed(args.file, problems))
            return Result("", 1)
        from tpcompile.ir.info import info_of
        from tpcompile.ir.text import format_graph
        from tpcompile.passes import for_ranks, parse_pipeline
        from tpcompile.rewriting.reproducer import with_pipeline, write_reproducer

        passes = parse_pipeline(pipeline) if pipeline else []
        _check_ranks(args.tp, passes)
        passes = for_ranks(passes, args.tp or info_of(graph_text.graph).tp)
        shown: list[str] = []
        render = renderer(args.format, origins=not args.no_origin)
        instruments: list[Instrument] = []
        if args.diff or args.print_ir_after:
            names = shown_names(args.print_ir_after, passes, INPUT)
            instruments.append(printer_of(args, render, names, shown))
        original = with_pipeline(format_graph(graph_text.graph), pipeline)

        def reproduce(text: str) -> str:
            """Write a reproducer, unless the file is the same one."""
            is_given = args.pipeline is None and text.endswith(original)
            return "" if is_given else write_reproducer(text)

        graph = run_pipeline(
            args, graph_text.graph, passes, instruments, say, on_failure=reproduce, first=INPUT
        )
        return finished(args, shown if instruments else [render(graph)])


def _check_options(args: argparse.Namespace) -> None:
    """Refuse invalid options before anything is read."""
    check_output(args.output)
    if args.verify_only and (args.pipeline or args.diff or args.print_ir_after or args.output):
        raise UsageError(
            "--verify-only runs no passes and prints no graph", hint="Leave out the other options"
        )
    if args.diff:
        check_diff(args.format)


def _check_ranks(tp: int | None, passes: Sequence[Pass]) -> None:
    """Refuse a number of ranks that no pass reads."""
    from tpcompile.passes.plan_sharding import PlanSharding

    if tp is not None and not any(isinstance(current, PlanSharding) for current in passes):
        raise UsageError(
            f"--tp {tp} has no effect without plan-sharding in the pipeline",
            hint="Leave out --tp, or add plan-sharding",
        )


def _verdict(file: Path, graph_text: GraphText, problems: list[Problem]) -> Result:
    if problems:
        return Result(_listed(file, problems), 1)
    count = len(graph_text.graph.graph.nodes)
    return Result(f"{name_of(file)}: the graph is valid ({count} nodes)\n")


def _listed(file: Path, problems: list[Problem]) -> str:
    from tpcompile.ir.problem import merged

    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    listed = "".join(f"  {problem}\n" for problem in merged(problems))
    return f"{name_of(file)}: {count}\n{listed}"


COMMAND = Command("run passes on the text of a graph", _EXAMPLES, _add_arguments, _run)
