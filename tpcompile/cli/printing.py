"""Printing of graphs, shared by commands: which stages to show, in which form, and where."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpcompile.cli.command import Parser, Result, json_text
from tpcompile.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from torch import fx

    from tpcompile.inspect.instruments import Render, Stats
    from tpcompile.passes import Instrument, Pass

SUFFIXES = {"text": "txt", "json": "json", "dot": "dot"}
CAPTURE = "capture"
"""The name of the stage before the first pass on a model."""
INPUT = "input"
"""The name of the stage before the first pass on the text of a graph."""
ALL = "all"


def add_output_option(parser: Parser) -> None:
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write to this file instead of stdout"
    )


def check_output(path: Path | None) -> None:
    """Refuse an output that cannot be written, before the work is done."""
    if path is not None:
        from tpcompile.inspect.files import check_file

        check_file(path)


def finished(args: argparse.Namespace, shown: Sequence[str]) -> Result:
    """Join what is shown, and write it to the output file if there is one."""
    text = _joined(args.format, shown)
    if args.output is None:
        return Result(text)
    from tpcompile.inspect.files import write_file

    write_file(args.output, lambda file: file.write(text))
    return Result("")


def _joined(form: str, shown: Sequence[str]) -> str:
    if form == "json" and shown and shown[0].startswith('{"stage"'):
        return '{"stages": [\n' + ",\n".join(shown) + "\n]}\n"
    return "\n".join(shown)


def check_diff(form: str, *stages: str | None) -> None:
    """Refuse options that have no diff."""
    if form != "text":
        raise UsageError(
            f"--diff requires --format text, got {form}", hint="Leave out --diff or --format"
        )
    first = next((stage for stage in stages if stage in (CAPTURE, INPUT)), None)
    if first is not None:
        raise UsageError(
            f"--diff cannot show {first}, because there is no stage before {first}",
            hint="Name a pass, or leave out --diff",
        )


def shown_names(
    name: str | None, passes: Sequence[Pass], first: str = CAPTURE
) -> frozenset[str] | None:
    """Return the names of the stages to show after their passes, or None for all."""
    if name in (None, ALL):
        return None
    assert name is not None
    check_stage("--print-ir-after", name, [ALL, first, *(current.name for current in passes)])
    return frozenset({name})


def check_stage(option: str, name: str, stages: Sequence[str]) -> None:
    if name not in stages:
        raise UsageError(
            f"{option} must name a pass of the pipeline, got {name!r}",
            hint=did_you_mean(name, stages),
        )


def renderer(
    form: str, rank: int | None = None, layer: int | None = None, origins: bool = True
) -> Render:
    """Return the function that formats a graph."""
    from tpcompile.inspect.dot import graph_dot
    from tpcompile.inspect.dump import graph_json
    from tpcompile.ir.info import info_of
    from tpcompile.ir.text import format_graph

    forms: dict[str, Callable[[fx.GraphModule, int | None], str]] = {
        "text": lambda gm, rank: format_graph(gm, rank, layer=layer, origins=origins),
        "json": lambda gm, rank: json_text(graph_json(gm, rank, layer)),
        "dot": graph_dot,
    }
    # Before plan-sharding, the graph is not split and has only one rank.
    return lambda gm: forms[form](gm, rank if info_of(gm).tp > 1 else None)


def printer_of(
    args: argparse.Namespace, render: Render, names: frozenset[str] | None, shown: list[str]
) -> Instrument:
    """Return the instrument that adds stages, or their diffs, to `shown`."""
    from tpcompile.inspect.instruments import PrintAfter, PrintDiff

    if args.diff:
        return PrintDiff(render, shown.append, names)
    if args.format != "json":
        return PrintAfter(render, shown.append, names)

    def keep_json(name: str, gm: fx.GraphModule, stats: Stats) -> None:
        if names is None or name in names:
            shown.append(f'{{"stage": {json.dumps(name)}, "graph": {render(gm).rstrip()}}}')

    return keep_json
