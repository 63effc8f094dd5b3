"""`tpcompile reduce`: shrink a graph on which something fails."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tpcompile.cli.command import Command, Parser, Result
from tpcompile.cli.compiling import progress
from tpcompile.cli.graph_file import add_graph_file, read_graph_file
from tpcompile.cli.printing import add_output_option, check_output
from tpcompile.errors import UsageError

if TYPE_CHECKING:
    from torch import fx

    from tpcompile.passes import Pass
    from tpcompile.rewriting.reduce import ErrorOf

_TOLERANCE = 1e-3
"""The largest error of numbers that is no failure, relative to the largest number."""

_EXAMPLES = """\
  tpcompile reduce reproducer.txt -o small.txt      passes that the file names
  tpcompile reduce graph.txt -p fuse-qkv            the same error of this pass
  tpcompile reduce graph.txt -p my-pass --numbers   wrong numbers after a pass
  tpcompile reduce graph.txt --command ./check.sh   the same status of a command

The command gets the name of a file with a graph as its last argument. The
result is the smallest graph found, as text that tpcompile opt runs again."""


def _add_arguments(parser: Parser) -> None:
    add_graph_file(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--numbers", action="store_true", help="the passes change the result of the graph"
    )
    group.add_argument(
        "--command", metavar="CMD", help="a command that fails with the same status decides"
    )
    add_output_option(parser)


def _run(args: argparse.Namespace) -> Result:
    check_output(args.output)
    with progress() as say:
        say(f"reading {args.file}")
        graph_text, pipeline = read_graph_file(args)
        from tpcompile.inspect.files import write_file
        from tpcompile.ir.info import info_of
        from tpcompile.ir.parse import verify_text
        from tpcompile.ir.text import format_graph
        from tpcompile.passes import for_ranks, parse_pipeline
        from tpcompile.rewriting.reduce import Reducer
        from tpcompile.rewriting.reproducer import with_pipeline

        verify_text(graph_text)
        passes = parse_pipeline(pipeline) if pipeline else []
        passes = for_ranks(passes, info_of(graph_text.graph).tp)
        before = len(graph_text.graph.graph.nodes)

        def follow(nodes: int, tries: int) -> None:
            say(f"{before} → {nodes} nodes, {tries} graphs tried")

        error_of = _error_of(args, graph_text.graph, passes, pipeline)
        reducer = Reducer(error_of, not args.numbers, follow)
        graph = reducer.reduce(graph_text.graph)
        text = with_pipeline(format_graph(graph), pipeline)
    sys.stderr.write(
        f"{before} → {len(graph.graph.nodes)} nodes, {reducer.tries} graphs tried, "
        f"all with the error: {reducer.error}\n"
    )
    if args.output is None:
        return Result(text)
    write_file(args.output, lambda file: file.write(text))
    return Result("")


def _error_of(
    args: argparse.Namespace, graph: fx.GraphModule, passes: list[Pass], pipeline: str
) -> ErrorOf:
    if args.command is not None:
        return _status_of(args.command, pipeline)
    if not passes:
        raise UsageError(
            "There is nothing that may fail",
            expected="passes (-p), a reproducer that names them, or a --command",
        )
    from tpcompile.rewriting.failures import check_inputs, error_of_numbers, error_of_passes

    if not args.numbers:
        return error_of_passes(passes)
    from tpcompile.frontend.rotary import SavedTables
    from tpcompile.ir.info import info_of

    check_inputs(graph)
    return error_of_numbers(passes, SavedTables(info_of(graph).rotary), _TOLERANCE)


def _status_of(command: str, pipeline: str) -> Callable[[fx.GraphModule], str]:
    """Return a function that runs a command on a graph; its status is the error."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError("--command is not valid", got=f"{command!r}: {error}") from error
    if not words:
        raise UsageError("--command must not be empty")

    def error_of(gm: fx.GraphModule) -> str:
        from tpcompile.ir.text import format_graph
        from tpcompile.rewriting.reproducer import with_pipeline

        with tempfile.TemporaryDirectory(prefix="tpcompile-") as directory:
            file = Path(directory) / "graph.txt"
            file.write_text(with_pipeline(format_graph(gm), pipeline), encoding="utf-8")
            try:
                ran = subprocess.run([*words, str(file)], capture_output=True, check=False)
            except OSError as error:
                reason = error.strerror or str(error)
                raise UsageError(f"{words[0]} cannot be run", got=reason) from error
        return f"status {ran.returncode}" if ran.returncode else ""

    return error_of


COMMAND = Command(
    "shrink a graph on which passes fail",
    _EXAMPLES,
    _add_arguments,
    _run,
)
