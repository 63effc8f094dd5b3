"""`tpcompile plan`: heads, bytes and collectives of each rank."""

from __future__ import annotations

import argparse

from tpcompile.cli.command import Command, Parser, Result, add_model_arguments, json_text
from tpcompile.cli.compiling import lower_model, passes_of, progress
from tpcompile.errors import UsageError

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

        report = plan_report(lower_model(args, passes, [], say))
    return Result(json_text(report.to_json()) if args.json else report.table())


COMMAND = Command(
    "show the heads, bytes and collectives of each rank",
    _EXAMPLES,
    _add_arguments,
    _run,
    pauses=True,
)
