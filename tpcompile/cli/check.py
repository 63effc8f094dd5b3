"""`tpcompile check`: run every pass, check the graph after each, and verify all schedules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpcompile.cli.command import (
    Command,
    FailedError,
    Parser,
    Result,
    add_model_arguments,
    json_text,
)
from tpcompile.cli.compiling import (
    Say,
    capture_model,
    passes_of,
    progress,
    run_pipeline,
    warn_unsharded,
)
from tpcompile.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import fx

    from tpcompile.frontend import Captured
    from tpcompile.inspect.instruments import PassLog
    from tpcompile.ir.problem import Problem
    from tpcompile.passes import Pass
    from tpcompile.vm.schedule.scheduled import Verdict

_EXAMPLES = """\
  tpcompile check preset:qwen3-0.6b --tp 3
  tpcompile check preset:qwen2.5-72b --tp 8 --json
  tpcompile check ./my-checkpoint --tp 2 -p "canonicalize,raise-norm"

Without -p, the decode pipeline is checked too. Its graph is scheduled with
every policy and both lowerings, and each schedule is verified.
The exit status is 0 if every graph and every schedule is valid, 1 if one is
not, or if a model of a preset's type has no schedule, 2 for bad input."""


@dataclass
class _Checked:
    """The results of the pipelines and of the schedules."""

    logs: dict[str, PassLog] = field(default_factory=dict)
    """The log of each pipeline, by pipeline name."""
    failed: str = ""
    """The pass that left an invalid graph."""
    problems: Sequence[Problem] = ()
    verdicts: Sequence[Verdict] = ()
    unscheduled: str = ""
    """The reason why the decode step was not scheduled, if any."""
    is_promised: bool = False
    """Whether the decode step of the model must have schedules."""

    @property
    def ok(self) -> bool:
        lacks_schedule = self.is_promised and self.unscheduled
        return not self.problems and not lacks_schedule and all(v.ok for v in self.verdicts)


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(args: argparse.Namespace) -> Result:
    with progress() as say:
        passes = passes_of(args)
        outcome = _check(args, passes, say)
        warn_unsharded(args, passes)
    text = _json(args, outcome) if args.json else _report(args, outcome)
    return Result(text, status=0 if outcome.ok else 1)


def _check(args: argparse.Namespace, passes: Sequence[Pass], say: Say) -> _Checked:
    """Run the pipelines and verify the schedules. Stop after the first pipeline that fails."""
    from tpcompile.options import with_choices
    from tpcompile.passes import decode_pipeline
    from tpcompile.vm.schedule.scheduled import is_decode_step

    outcome = _Checked()
    captured = capture_model(args, say)
    name = "standard" if args.pipeline is None else "given"
    graph = _run_checked(args, captured, name, passes, outcome, say)
    if graph is not None and args.pipeline is None:
        decode = with_choices(decode_pipeline(args.tp), args.kv, args.experts)
        name, passes = "decode", decode
        graph = _run_checked(args, captured, name, passes, outcome, say)
    outcome.is_promised = _is_promised(captured, passes)
    if graph is not None and (outcome.is_promised or is_decode_step(graph)):
        _check_schedules(graph, outcome.logs[name], outcome, say)
    return outcome


def _is_promised(captured: Captured, passes: Sequence[Pass]) -> bool:
    """Return whether a program is promised: to models of a preset's type, by the decode passes."""
    from tpcompile.passes import decode_pipeline
    from tpcompile.presets import PRESETS, preset

    needed = {current.name for current in decode_pipeline()}
    types = {preset(name)["model_type"] for name in PRESETS}
    is_decode = needed <= {current.name for current in passes}
    return is_decode and captured.config.model_type in types


def _run_checked(
    args: argparse.Namespace,
    captured: Captured,
    name: str,
    passes: Sequence[Pass],
    outcome: _Checked,
    say: Say,
) -> fx.GraphModule | None:
    from tpcompile.inspect.instruments import PassLog

    log = outcome.logs[name] = PassLog()
    try:
        return run_pipeline(args, captured.graph, passes, [log], say)
    except FailedError as error:
        outcome.failed, outcome.problems = error.name, error.problems
        log.failed(error.name, error.stats)
        sys.stderr.write(f"{error.reproducer}\n")
        return None


def _check_schedules(graph: fx.GraphModule, log: PassLog, outcome: _Checked, say: Say) -> None:
    from tpcompile.vm.schedule.scheduled import verdicts

    say("verifying schedules")
    try:
        outcome.verdicts = verdicts(graph)
    except UnsupportedError as error:
        idle = [row.name for row in log.rows if not row.matches]
        outcome.unscheduled = f"{error} Passes without a match: {', '.join(idle) or 'none'}."


def _json(args: argparse.Namespace, outcome: _Checked) -> str:
    errors = [{"pass": outcome.failed, **problem.to_json()} for problem in outcome.problems]
    errors += [
        {
            "pass": "schedule",
            "node": "",
            "source": verdict.name,
            "rule": fault.rule,
            "got": fault.message,
            "expected": "a program that is proved free of races and deadlocks",
            "hint": "",
        }
        for verdict in outcome.verdicts
        for fault in verdict.faults
    ]
    if outcome.is_promised and outcome.unscheduled:
        errors.append(
            {
                "pass": "schedule",
                "node": "",
                "source": "",
                "rule": "promised",
                "got": outcome.unscheduled,
                "expected": "schedules of the decode step",
                "hint": "",
            }
        )
    data: dict[str, Any] = {
        "ok": outcome.ok,
        "model": args.model,
        "tp": args.tp,
        "passes": [
            {**row.to_json(), "pipeline": name}
            for name, log in outcome.logs.items()
            for row in log.rows
        ],
        "schedules": [verdict.to_json() for verdict in outcome.verdicts],
        "unscheduled": outcome.unscheduled or None,
        "errors": errors,
    }
    return json_text(data)


def _report(args: argparse.Namespace, outcome: _Checked) -> str:
    whose = f"{args.model}, tp={args.tp}"
    tables = [f"{name} pipeline\n{log.table(verdict=True)}" for name, log in outcome.logs.items()]
    return "".join(tables) + _verdict(whose, outcome)


def _verdict(whose: str, outcome: _Checked) -> str:
    from tpcompile.inspect.schedule import count_of, fault_lines
    from tpcompile.ir.problem import merged

    if outcome.problems:
        count = "1 problem" if len(outcome.problems) == 1 else f"{len(outcome.problems)} problems"
        listed = "".join(f"  {problem}\n" for problem in merged(outcome.problems))
        return f"{whose}: {count} after {outcome.failed}\n{listed}"
    valid = f"{whose}: the graph is valid after each pass\n{_proof(whose, outcome)}"
    if outcome.unscheduled:
        promised = "NO SCHEDULE of the decode step, which models of this type have"
        summary = promised if outcome.is_promised else "no schedule"
        return f"{valid}{whose}: {summary}. {outcome.unscheduled}\n"
    alike: dict[str, list[Verdict]] = {}
    for verdict in outcome.verdicts:
        if not verdict.ok:
            alike.setdefault(fault_lines(verdict.faults), []).append(verdict)
    lines = [
        f"{first.name}{f', and {len(similar)} more' if similar else ''}: {count_of(first.faults)}\n"
        f"{listed}"
        for listed, (first, *similar) in alike.items()
    ]
    if outcome.verdicts and not alike:
        computed = dict.fromkeys(verdict.computed.summary for verdict in outcome.verdicts)
        lines = [
            f"{whose}: {len(outcome.verdicts)} schedules of a decode step are verified\n",
            f"{whose}: programs compute the graph: {'; '.join(computed)}\n",
        ]
    return valid + "".join(lines)


def _proof(whose: str, outcome: _Checked) -> str:
    """Return which passes of which pipelines are not proved, if any."""
    unproved = [
        f"{whose}: not proved: {name} of the {pipeline} pipeline: {reason}\n"
        for pipeline, log in outcome.logs.items()
        for name, reason in log.unproved.items()
    ]
    return "".join(unproved) or f"{whose}: proved equal to the captured graph\n"


COMMAND = Command(
    "run every pass, check the graph after each, and verify schedules",
    _EXAMPLES,
    _add_arguments,
    _run,
)
