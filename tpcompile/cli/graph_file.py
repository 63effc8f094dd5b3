"""The graph that commands read from a file or from stdin."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tpcompile.cli.command import Parser
from tpcompile.errors import UsageError

if TYPE_CHECKING:
    from tpcompile.ir.text import GraphText


def add_graph_file(parser: Parser) -> None:
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="the text of a graph, or - for stdin"
    )
    parser.add_argument(
        "-p",
        "--pipeline",
        metavar="PIPELINE",
        help='passes to run, e.g. "fuse-qkv,fuse-gate-up"; default: those that a reproducer names, '
        "or none (see tpcompile passes)",
    )


def read_graph_file(args: argparse.Namespace) -> tuple[GraphText, str]:
    """Return the graph of a file, unchecked, and the pipeline to run."""
    text = _text_of(args.file)
    from tpcompile.ir.text import read_graph
    from tpcompile.rewriting.reproducer import pipeline_of

    name = name_of(args.file)
    try:
        graph = read_graph(text)
    except UsageError as error:
        raise error.at(f"{name}, {error.where}" if error.where else name) from error
    pipeline = pipeline_of(text) if args.pipeline is None else args.pipeline
    return graph, pipeline or ""


def name_of(file: Path) -> str:
    """Return the name of a file in messages."""
    return "stdin" if str(file) == "-" else str(file)


def _text_of(file: Path) -> str:
    name = name_of(file)
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8-sig")  # editors of Windows begin with a mark
    except OSError as error:
        raise UsageError(f"{name} cannot be read", got=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not text in UTF-8", got=f"the byte {error.object[error.start]:#04x}",
            expected="the text of a graph, as `tpcompile dump` prints it",
        ) from error  # fmt: skip
