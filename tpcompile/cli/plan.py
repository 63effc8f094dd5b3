"""`tpcompile plan`: heads, bytes and collectives of each rank."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tpcompile.cli.command import Command, Parser, Result, add_model_arguments, json_text
from tpcompile.cli.compiling import Say, capture_model, passes_of, progress, run_pipeline
from tpcompile.cli.wording import with_options
from tpcompile.errors import UsageError

if TYPE_CHECKING:
    from torch import fx

_EXAMPLES = """\
  tpcompile plan preset:qwen2.5-0.5b --tp 4          14 query heads on 4 ranks
  tpcompile plan preset:qwen3-8b --tp 6 --json
  tpcompile plan preset:qwen3-30b-a3b --tp 4         the plans of 128 experts
  tpcompile plan preset:qwen3-30b-a3b --tp 4 --experts ep
  tpcompile plan ./my-checkpoint --tp 2 --dtype bfloat16"""


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _run(args: argparse.Namespace) -> Result:
    with progress() as say:
        passes = passes_of(args)
        from tpcompile.options import shards

        if not shards(passes):
            raise UsageError(
                "The pipeline has no plan-sharding pass, so it makes no plan",
                hint="Add plan-sharding to the pipeline, or leave out -p",
            )
        from tpcompile.inspect.plan import plan_report

        graph = run_pipeline(args, _captured(args, say), passes, [], say)
        report = plan_report(graph)
    return Result(json_text(report.to_json()) if args.json else report.table())


def _captured(args: argparse.Namespace, say: Say) -> fx.GraphModule:
    """Return the graph of the model; weights that are not read count as if not quantized."""
    from tpcompile.frontend import UnreadWeightsError, config_of
    from tpcompile.frontend.source import name_of
    from tpcompile.ir.info import info_of

    try:
        return capture_model(args, say).graph
    except UnreadWeightsError as error:
        config = config_of(args.model)
        config.quantization_config = None
        config.dtype = config.dtype or "bfloat16"
        graph = capture_model(args, say, config).graph
        info_of(graph).name = name_of(args.model)
        reason = with_options(str(error), tuple(vars(args)), ())
        sys.stderr.write(f"warning: the plan counts weights that are not quantized. {reason}\n")
        return graph


COMMAND = Command(
    "show the heads, bytes and collectives of each rank",
    _EXAMPLES,
    _add_arguments,
    _run,
    pauses=True,
)
