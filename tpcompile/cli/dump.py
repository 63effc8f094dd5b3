"""`tpcompile dump`: the graph of a model, after all passes or after any of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_model_arguments,
    choice,
    json_text,
    number,
)
from tpcompile.cli.compiling import lower_model, passes_of, progress
from tpcompile.errors import UsageError
from tpcompile.presets import did_you_mean

if TYPE_CHECKING:
    from torch import fx

    from tpcompile.passes import Instrument, Pass

_SUFFIXES = {"text": "txt", "json": "json", "dot": "dot"}
_CAPTURE = "capture"
"""The stage before any pass."""

_EXAMPLES = """\
  tpcompile dump preset:tiny-qwen3 --tp 2
  tpcompile dump preset:tiny-qwen3 --tp 4 --rank 3            what rank 3 holds and does
  tpcompile dump preset:tiny-qwen3 --tp 2 --stop-after capture     before any pass
  tpcompile dump preset:tiny-qwen3 --tp 2 --diff              what each pass changed
  tpcompile dump preset:tiny-qwen3 --tp 2 --diff --print-ir-after fuse-qkv
  tpcompile dump preset:tiny-qwen3 --tp 2 --dump-dir stages   a file for each stage
  tpcompile dump preset:tiny-qwen3 --tp 2 --format dot | dot -Tsvg > graph.svg
  tpcompile dump ./my-checkpoint --tp 2 -p "canonicalize,raise-norm" """


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--rank",
        metavar="R",
        type=number(0, "a rank"),
        help="show the shapes and recipes of this rank; default: of all",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--print-ir-after",
        metavar="all|NAME",
        help="show the graph after this pass (capture: before any), or after each",
    )
    which.add_argument("--stop-after", metavar="NAME", help="run no pass behind this one")
    parser.add_argument(
        "--diff", action="store_true", help="show what the passes changed, not whole graphs"
    )
    parser.add_argument(
        "--dump-dir",
        metavar="D",
        type=Path,
        help="also write one file a stage into this directory: 00-capture.txt, …",
    )
    parser.add_argument(
        "--format",
        type=choice(*_SUFFIXES),
        metavar="F",
        default="text",
        help="text, json or dot (Graphviz); default: text",
    )
    parser.add_argument(
        "--json", dest="format", action="store_const", const="json", help="the same as --format json"
    )


def _run(args: argparse.Namespace) -> Result:
    _check_options(args)
    if args.dump_dir is not None:
        from tpcompile.inspect.files import check_directory

        check_directory(args.dump_dir)
    with progress() as say:
        passes = _truncated(args, passes_of(args))
        _check_stage(args.print_ir_after, passes)
        from tpcompile.inspect.files import write_stages
        from tpcompile.inspect.instruments import KeepStages

        render = _renderer(args.format, args.rank)
        keep = KeepStages(render)
        shown: list[str] = []
        instruments: list[Instrument] = [_keeps(args, keep)]
        graph = lower_model(args, passes, [*printers, *keepers], say)
    return Result("")


COMMAND = Command(
    "print the graph of a model, after all passes or after any of them",
    _EXAMPLES,
    _add_arguments,
    _run,
)
