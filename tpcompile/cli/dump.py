"""`tpcompile dump`: print the graph of a model, after all passes or after a given one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
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
from tpcompile.cli.compiling import lower_model, passes_of, progress, warn_unsharded
from tpcompile.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from torch import fx

    from tpcompile.inspect.instruments import Render, Stats
    from tpcompile.passes import Instrument, Pass

_SUFFIXES = {"text": "txt", "json": "json", "dot": "dot"}
_CAPTURE = "capture"
"""The name of the stage before the first pass."""
_ALL = "all"

_EXAMPLES = """\
  tpcompile dump preset:tiny-qwen3 --tp 2
  tpcompile dump preset:tiny-qwen3 --tp 4 --rank 3        the shapes of rank 3
  tpcompile dump preset:tiny-qwen3 --tp 2 --diff          the diff of each pass
  tpcompile dump preset:tiny-qwen3 --tp 2 --diff --print-ir-after fuse-qkv
  tpcompile dump preset:tiny-qwen3 --tp 2 --stop-after capture     the raw graph
  tpcompile dump preset:tiny-qwen3 --tp 2 --dump-dir D    one file per stage
  tpcompile dump preset:tiny-qwen3 --tp 2 --format dot | dot -Tsvg > graph.svg
  tpcompile dump ./my-checkpoint --tp 2 -p "canonicalize,raise-norm"
  tpcompile dump preset:tiny-qwen3 --tp 2 -p decode --print-ir-after all
  tpcompile dump preset:tiny-qwen3 --tp 1 --kernel h200   the Triton kernel
"""


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--rank",
        metavar="R",
        type=number(0, "the rank"),
        help="show the shapes and recipes of this rank; default: all ranks",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--print-ir-after",
        metavar="all|NAME",
        help="show the graph after this pass, after every pass (all), or as captured (capture)",
    )
    which.add_argument("--stop-after", metavar="NAME", help="stop after this pass")
    parser.add_argument(
        "--kernel",
        metavar="TARGET",
        help="show the source of the Triton kernel that runs decode steps on a target, e.g. h200",
    )
    parser.add_argument(
        "--diff", action="store_true", help="show a diff for each pass instead of whole graphs"
    )
    parser.add_argument(
        "--dump-dir",
        metavar="D",
        type=Path,
        help="also write one file per stage into this directory: 00-capture.txt, ...",
    )
    parser.add_argument(
        "--format",
        type=choice(*_SUFFIXES),
        metavar="F",
        default="text",
        help="text, json or dot (Graphviz); default: text",
    )
    parser.add_argument(
        "--json",
        dest="format",
        action="store_const",
        const="json",
        help="same as --format json",
    )


def _run(args: argparse.Namespace) -> Result:
    _check_options(args)
    if args.kernel:
        return Result(_kernel(args))
    with progress() as say:
        pipeline = passes_of(args)
        passes = _stopped(pipeline, args.stop_after)
        names = _names(args, passes)
        from tpcompile.inspect.files import write_stages
        from tpcompile.inspect.instruments import KeepStages

        render = _renderer(args.format, args.rank)
        files = KeepStages(render)
        shown: list[str] = []
        instruments: list[Instrument] = [files] if args.dump_dir else []
        if args.diff or args.print_ir_after:
            instruments.append(_printer(args, render, names, shown))
        graph = lower_model(args, passes, instruments, say)
        warn_unsharded(args, pipeline)
        if args.dump_dir:
            written = write_stages(args.dump_dir, files.stages, _SUFFIXES[args.format])
            sys.stderr.write(f"wrote {len(written)} files to {args.dump_dir}\n")
        if not (args.diff or args.print_ir_after):
            return Result(render(graph))
        return Result(_joined(args.format, shown))


def _kernel(args: argparse.Namespace) -> str:
    """Return the source of the Triton kernel of a decode step."""
    with progress() as say:
        say(f"scheduling for {args.kernel}")
        from tpcompile.scheduling import schedule

        found = schedule(
            args.model, tp=args.tp, target=args.kernel, dtype=args.dtype, pipeline=args.pipeline
        )
        return found.kernel()


def _check_options(args: argparse.Namespace) -> None:
    """Refuse invalid options before anything is loaded."""
    if args.rank is not None and args.rank >= args.tp:
        raise UsageError(
            f"--rank must be less than --tp, got {args.rank} and {args.tp}",
            expected=f"--rank 0 to {args.tp - 1}",
        )
    if args.diff and args.format != "text":
        raise UsageError(
            f"--diff requires --format text, got {args.format}", hint="Leave out --diff or --format"
        )
    if args.diff and _CAPTURE in (args.stop_after, args.print_ir_after):
        raise UsageError(
            "--diff cannot show capture, because there is no stage before capture",
            hint="Name a pass, or leave out --diff",
        )
    if args.dump_dir:
        from tpcompile.inspect.files import check_directory

        check_directory(args.dump_dir)


def _stopped(passes: Sequence[Pass], name: str | None) -> Sequence[Pass]:
    """Return the passes up to and including the first one with this name."""
    if name is None:
        return passes
    stages = [_CAPTURE, *(current.name for current in passes)]
    _check_stage("--stop-after", name, stages)
    return passes[: stages.index(name)]


def _names(args: argparse.Namespace, passes: Sequence[Pass]) -> frozenset[str] | None:
    """Return the names of the stages to show, or None for all."""
    name = args.print_ir_after
    if name in (None, _ALL):
        return None
    _check_stage("--print-ir-after", name, [_ALL, _CAPTURE, *(p.name for p in passes)])
    return frozenset({name})


def _check_stage(option: str, name: str, stages: Sequence[str]) -> None:
    if name not in stages:
        raise UsageError(
            f"{option} must name a pass of the pipeline, got {name!r}",
            hint=did_you_mean(name, stages),
        )


def _renderer(form: str, rank: int | None) -> Render:
    from tpcompile.inspect.dot import graph_dot
    from tpcompile.inspect.dump import graph_json
    from tpcompile.ir.info import info_of
    from tpcompile.ir.text import format_graph

    forms: dict[str, Callable[[fx.GraphModule, int | None], str]] = {
        "text": format_graph,
        "json": lambda gm, rank: json_text(graph_json(gm, rank)),
        "dot": graph_dot,
    }
    # Before plan-sharding, the graph is not split and has only one rank.
    return lambda gm: forms[form](gm, rank if info_of(gm).tp > 1 else None)


def _printer(
    args: argparse.Namespace, render: Render, names: frozenset[str] | None, shown: list[str]
) -> Instrument:
    from tpcompile.inspect.instruments import PrintAfter, PrintDiff

    if args.diff:
        return PrintDiff(render, shown.append, names)
    if args.format != "json":
        return PrintAfter(render, shown.append, names)

    def keep_json(name: str, gm: fx.GraphModule, stats: Stats) -> None:
        if names is None or name in names:
            shown.append(f'{{"stage": {json.dumps(name)}, "graph": {render(gm).rstrip()}}}')

    return keep_json


def _joined(form: str, shown: Sequence[str]) -> str:
    if form == "json":
        return '{"stages": [\n' + ",\n".join(shown) + "\n]}\n"
    return "\n".join(shown)


COMMAND = Command(
    "print the graph of a model, after all passes or after a given one",
    _EXAMPLES,
    _add_arguments,
    _run,
)
