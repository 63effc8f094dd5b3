"""`tpcompile check`: every pass, with the checker behind each."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tpcompile.cli.command import (
    Command,
    FailedError,
    Parser,
    Result,
    add_model_arguments,
    json_text,
)
from tpcompile.cli.compiling import lower_model, passes_of, progress, warn_unsharded

if TYPE_CHECKING:
    from tpcompile.inspect.instruments import PassLog
    from tpcompile.ir.checker import Problem

_EXAMPLES = """\
  tpcompile check preset:qwen3-0.6b --tp 3
  tpcompile check preset:qwen2.5-72b --tp 8 --json
  tpcompile check ./my-checkpoint --tp 2 -p "canonicalize,raise-norm"

The exit status is 0 if all graphs are valid, 1 if one is not, 2 for bad input."""


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def _run(args: argparse.Namespace) -> Result:
    with progress() as say:
        passes = passes_of(args)
        from tpcompile.inspect.instruments import PassLog

        log = PassLog()
        problems: list[Problem] = []
        try:
            lower_model(args, passes, [log], say)
        except FailedError as error:
            problems = error.problems
            log.failed(error.name, error.stats)
        warn_unsharded(args, passes)
    text = _json(args, log, problems) if args.json else _report(args, log, problems)
    return Result(text, status=1 if problems else 0)


def _json(args: argparse.Namespace, log: PassLog, problems: list[Problem]) -> str:
    failed = log.rows[-1].name if problems else ""
    data: dict[str, Any] = {
        "ok": not problems,
        "model": args.model,
        "tp": args.tp,
        "passes": [row.to_json() for row in log.rows],
        "errors": [{"pass": failed, **problem.to_json()} for problem in problems],
    }
    return json_text(data)


def _report(args: argparse.Namespace, log: PassLog, problems: list[Problem]) -> str:
    whose = f"{args.model}, tp={args.tp}"
    if not problems:
        return f"{log.table(verdict=True)}{whose}: the graph is valid after each pass\n"
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    listed = "".join(f"  {problem}\n" for problem in problems)
    failed = f"{whose}: {count} after {log.rows[-1].name}\n"
    return log.table(verdict=True) + failed + listed


COMMAND = Command(
    "run every pass and check the graph behind each",
    _EXAMPLES,
    _add_arguments,
    _run,
)
