"""`tpcompile dump`: print the graph of a model, after all passes or after a given one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_model_arguments,
    choice,
    model_options,
    number,
)
from tpcompile.cli.compiling import lower_model, passes_of, progress, warn_unsharded
from tpcompile.cli.printing import (
    CAPTURE,
    SUFFIXES,
    add_output_option,
    check_diff,
    check_output,
    check_stage,
    finished,
    printer_of,
    renderer,
    shown_names,
)
from tpcompile.errors import UsageError

if TYPE_CHECKING:
    from torch import fx

    from tpcompile.passes import Instrument, Pass

_EXAMPLES = """\
  tpcompile dump preset:tiny-qwen3 --tp 2
  tpcompile dump preset:tiny-qwen3 --tp 4 --rank 3        the shapes of rank 3
  tpcompile dump preset:tiny-qwen3 --tp 2 --diff          the diff of each pass
  tpcompile dump preset:tiny-qwen3 --tp 2 --diff --print-ir-after fuse-qkv
  tpcompile dump preset:tiny-qwen3 --tp 2 --stop-after capture     the raw graph
  tpcompile dump preset:tiny-qwen3 --tp 2 --print-ir-before fuse-qkv -o a.txt
  tpcompile dump preset:tiny-qwen3 --tp 2 --layer 0 --no-origin  short lines
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
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--print-ir-after",
        metavar="all|NAME",
        help="show the graph after this pass, after every pass (all), or as captured (capture)",
    )
    group.add_argument(
        "--print-ir-before", metavar="NAME", help="show the graph before this pass, and stop there"
    )
    group.add_argument("--stop-after", metavar="NAME", help="stop after this pass")
    parser.add_argument(
        "--layer",
        metavar="N",
        type=number(0, "the layer"),
        help="show only the lines of this layer",
    )
    parser.add_argument(
        "--no-origin", action="store_true", help="leave out the place in the model of each line"
    )
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
        type=choice(*SUFFIXES),
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
    add_output_option(parser)


def _run(args: argparse.Namespace) -> Result:
    _check_options(args)
    if args.kernel:
        return finished(args, [_kernel(args)])
    with progress() as say:
        pipeline = passes_of(args)
        passes = _stopped(pipeline, args)
        names = shown_names(args.print_ir_after, passes)
        from tpcompile.inspect.files import write_stages
        from tpcompile.inspect.instruments import KeepStages

        render = renderer(args.format, args.rank, args.layer, not args.no_origin)
        files = KeepStages(render)
        shown: list[str] = []
        instruments: list[Instrument] = [files] if args.dump_dir else []
        if args.diff or args.print_ir_after:
            instruments.append(printer_of(args, render, names, shown))
        graph = lower_model(args, passes, instruments, say)
        _check_layer(graph, args.layer)
        warn_unsharded(args, pipeline)
        if args.dump_dir:
            written = write_stages(args.dump_dir, files.stages, SUFFIXES[args.format])
            sys.stderr.write(f"wrote {len(written)} files to {args.dump_dir}\n")
        if not (args.diff or args.print_ir_after):
            shown.append(render(graph))
        return finished(args, shown)


def _kernel(args: argparse.Namespace) -> str:
    """Return the source of the Triton kernel of a decode step."""
    with progress() as say:
        say(f"scheduling for {args.kernel}")
        from tpcompile.scheduling import schedule

        return schedule(args.model, target=args.kernel, **model_options(args)).kernel()


_OF_GRAPHS = ("rank", "layer", "print_ir_after", "print_ir_before", "stop_after", "dump_dir")
"""The options that apply to graphs, and not to the kernel."""


def _check_options(args: argparse.Namespace) -> None:
    """Refuse invalid options before anything is loaded."""
    given = [name for name in _OF_GRAPHS if getattr(args, name) is not None]
    if args.kernel and (given or args.diff):
        option = f"--{given[0].replace('_', '-')}" if given else "--diff"
        raise UsageError(
            f"{option} applies to graphs, and --kernel shows a kernel",
            hint=f"Leave out {option} or --kernel",
        )
    if args.rank is not None and args.rank >= args.tp:
        raise UsageError(
            f"--rank must be less than --tp, got {args.rank} and {args.tp}",
            expected=f"--rank 0 to {args.tp - 1}",
        )
    if args.diff:
        check_diff(args.format, args.stop_after, args.print_ir_after)
    if args.layer is not None and args.format == "dot":
        raise UsageError(
            "--layer requires --format text or json, got dot", hint="Leave out --layer or --format"
        )
    check_output(args.output)
    if args.dump_dir:
        from tpcompile.inspect.files import check_directory

        check_directory(args.dump_dir)


def _check_layer(graph: fx.GraphModule, layer: int | None) -> None:
    from tpcompile.ir.meta import origin_of

    layers = {origin_of(node).layer for node in graph.graph.nodes} - {None}
    if layer is not None and layer not in layers:
        raise UsageError(
            f"The model has no layer {layer}", expected=f"a layer from 0 to {len(layers) - 1}"
        )


def _stopped(passes: Sequence[Pass], args: argparse.Namespace) -> Sequence[Pass]:
    """Return the passes to run: all, or those up to the one that an option names."""
    names = [current.name for current in passes]
    if args.print_ir_before is not None:
        check_stage("--print-ir-before", args.print_ir_before, names)
        return passes[: names.index(args.print_ir_before)]
    if args.stop_after is None:
        return passes
    stages = [CAPTURE, *names]
    check_stage("--stop-after", args.stop_after, stages)
    return passes[: stages.index(args.stop_after)]


COMMAND = Command(
    "print the graph of a model, after all passes or after a given one",
    _EXAMPLES,
    _add_arguments,
    _run,
)
