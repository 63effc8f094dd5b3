"""`tpcompile schedule`: assign the instructions of a decode step to workers, and verify it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_model_arguments,
    add_threads_argument,
    choice,
    json_text,
    number,
    workers_of,
)
from tpcompile.cli.compiling import Say, lower_model, progress
from tpcompile.cli.numbers import layer_range
from tpcompile.errors import UsageError
from tpcompile.presets import check_model_name

if TYPE_CHECKING:
    from tpcompile.backends.triton.ahead import Compiled
    from tpcompile.inspect.schedule import ScheduleReport
    from tpcompile.inspect.step_trace import StepTrace
    from tpcompile.scheduling import Choices

_EXAMPLES = """\
  tpcompile schedule preset:qwen3-8b --target h200
  tpcompile schedule preset:qwen3-0.6b --target cpu --workers 8 --policy zigzag
  tpcompile schedule preset:qwen3-8b --target h200 --svg a.svg --trace a.json
  tpcompile schedule preset:qwen3-8b --target h200 --svg a.svg --svg-layers 8:10
  tpcompile schedule preset:tiny-qwen3 --target cpu --tp 2 --json
  tpcompile schedule preset:tiny-qwen3 --target cpu --workers 2 --text
  tpcompile schedule preset:tiny-qwen3 --target h200 --kernel
  tpcompile schedule preset:qwen3-0.6b --target cpu --measured --trace a.json
  tpcompile schedule preset:qwen3-0.6b --target cpu --measured --threads 2
  tpcompile schedule preset:qwen3-0.6b --target h200 --measured --device cuda
  tpcompile schedule preset:qwen3-0.6b --target h200 --aot sm_90

Open the trace in https://ui.perfetto.dev. A target may be a JSON file with any
fields of tpcompile.vm.targets.Target; missing fields have the values of cpu.
The exit status is 0 if the program is proved free of races and deadlocks, 1 if
it is not, 2 for bad input."""

_ROTARY = ("half", "interleaved")


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser, pipeline_default="the decode pipeline")
    parser.add_argument(
        "--target",
        metavar="T",
        required=True,
        help="cpu, a100, h100, h200, b200, or a file NAME.json",
    )
    parser.add_argument(
        "--workers",
        metavar="W",
        type=number(1, "the number of workers"),
        help="workers per rank; default: the target's, which for cpu is one per core",
    )
    parser.add_argument(
        "--policy",
        metavar="P",
        help="round-robin, zigzag, wave, critical-path or dynamic; default: dynamic if the target "
        "has several blocks per worker, as cpu has, else critical-path",
    )
    parser.add_argument(
        "--lowering",
        metavar="L",
        default="auto",
        help="heads: whole heads in each instruction; rows: blocks of rows, of which the last to "
        "arrive finishes the head; auto: rows if there are fewer heads than workers; "
        "default: auto",
    )
    parser.add_argument(
        "--rotary",
        metavar="R",
        type=choice(*_ROTARY),
        default="half",
        help="order of the rotated pairs in a head: half or interleaved; default: half",
    )
    _add_sizes(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of tables")
    form.add_argument("--text", action="store_true", help="print the program instead of tables")
    form.add_argument(
        "--kernel", action="store_true", help="print the Triton kernel of the program"
    )
    parser.add_argument("--trace", metavar="F.json", type=Path, help="write a Perfetto trace")
    parser.add_argument(
        "--measured",
        action="store_true",
        help="also run steps on this machine, with random weights; show their times in the trace "
        "and in a table",
    )
    parser.add_argument("--device", metavar="D", help="cpu or cuda, for --measured; default: cpu")
    add_threads_argument(parser, "for --measured, ")
    parser.add_argument("--svg", metavar="F.svg", type=Path, help="write a picture of the schedule")
    parser.add_argument(
        "--svg-layers",
        metavar="A:B",
        type=layer_range,
        help="layers that the picture shows in detail, from A to B-1; default: all, or the first "
        "ones of a long program",
    )
    parser.add_argument(
        "--aot",
        metavar="ARCH",
        help="also compile the Triton kernel for a GPU such as sm_90, which need not be here, and "
        "print the resources that it takes",
    )


def _add_sizes(parser: Parser) -> None:
    for option, name, subject, help in (
        ("--batch", "B", "the batch size", "number of sequences; default: 1"),
        ("--context", "C", "the context", "sequence length of the time estimate; default: 1024"),
        ("--max-seq-len", "L", "the length", "maximum tokens per sequence; default: the context, "
                                             "at least 1024"),
        ("--spans", "S", "the number of spans", "parts of a sequence in attention; default: the "
                                                "target's"),
    ):  # fmt: skip
        parser.add_argument(option, metavar=name, type=number(1, subject), help=help)


def _run(args: argparse.Namespace) -> Result:
    check_model_name(args.model)
    _check_files(args)
    with progress() as say:
        choices = _choices(args)
        from tpcompile.inspect.schedule import ScheduleReport
        from tpcompile.vm.schedule.scheduled import scheduled

        graph = lower_model(args, choices.passes, [], say)
        say(f"scheduling for {choices.target.name}")
        schedule = scheduled(graph, choices.target, choices.plan, choices.policy)
        options = choices.by_name(args.model) | {"target": args.target}
        report = ScheduleReport(options, schedule)
        measured = _measure(args, report, say) if args.measured and not schedule.faults else None
        kernel = _compile(args, report, say) if args.aot and not schedule.faults else None
        say("writing")
        _write_files(args, report, measured)
        return Result(_text(args, report, measured, kernel), status=1 if schedule.faults else 0)


def _compile(args: argparse.Namespace, report: ScheduleReport, say: Say) -> Compiled:
    from tpcompile.scheduling import ScheduledStep

    say(f"compiling the kernel for {args.aot}")
    return ScheduledStep(report).compile_ahead(args.aot)


def _measure(args: argparse.Namespace, report: ScheduleReport, say: Say) -> StepTrace:
    from tpcompile.cores import cores
    from tpcompile.options import device_of
    from tpcompile.scheduling import ScheduledStep

    device = device_of(args.device)
    threads = report.choices["workers"] * args.tp
    if device.type == "cpu" and threads > cores():
        sys.stderr.write(f"warning: {threads} workers share {cores()} cores\n")
    return ScheduledStep(report).measure(
        device=device, progress=lambda done: say(f"measured {done} steps")
    )


def _text(
    args: argparse.Namespace,
    report: ScheduleReport,
    measured: StepTrace | None,
    kernel: Compiled | None,
) -> str:
    if args.text or args.kernel:
        from tpcompile.backends.triton.emit import emit
        from tpcompile.inspect.schedule import fault_lines
        from tpcompile.vm.program.text import format_program

        sys.stderr.write(fault_lines(report.schedule.faults))
        program = report.schedule.program
        return format_program(program) if args.text else emit(program).source
    if args.json:
        extra = {} if measured is None else {"measured": measured.to_json()}
        extra |= {} if kernel is None else {"aot": kernel.to_json()}
        return json_text(report.to_json() | extra)
    tables = [part.table() for part in (report, measured, kernel) if part is not None]
    return "".join(tables)


def _check_files(args: argparse.Namespace) -> None:
    from tpcompile.inspect.files import check_file

    wanted = [os.path.realpath(path) for path in (args.trace, args.svg) if path is not None]
    if len(set(wanted)) < len(wanted):
        raise UsageError(
            "--trace and --svg name the same file",
            got=str(args.svg),
            expected="two different files",
        )
    for path in (args.trace, args.svg):
        if path is not None:
            check_file(path)
    if args.svg_layers and not args.svg:
        raise UsageError("--svg-layers chooses the layers of a picture", hint="Add --svg F.svg")


def _choices(args: argparse.Namespace) -> Choices:
    """Resolve the options. Refuse invalid ones before the model is captured."""
    from tpcompile.options import device_of
    from tpcompile.scheduling import choose
    from tpcompile.vm.targets import TARGETS

    if args.target in TARGETS:
        args.target = TARGETS.spelling(args.target)
    if args.measured:
        _check_form(args, "--measured")
    if args.aot is not None:
        _check_ahead(args)
    if args.threads is not None:
        _check_threads(args)
    return choose(
        tp=args.tp,
        target=args.target,
        policy=args.policy,
        workers=workers_of(args),
        batch=args.batch or 1,
        context=args.context,
        max_seq_len=args.max_seq_len,
        lowering=args.lowering,
        spans=args.spans,
        interleaved=args.rotary == "interleaved",
        pipeline=args.pipeline,
        measured=device_of(args.device) if args.measured else None,
        kv=args.kv,
        experts=args.experts,
    )


def _check_ahead(args: argparse.Namespace) -> None:
    """Refuse an unknown architecture before the model is captured."""
    from tpcompile.backends.triton.ahead import check_ahead

    _check_form(args, "--aot")
    check_ahead(args.aot)


def _check_threads(args: argparse.Namespace) -> None:
    """Refuse threads of a program that does not run here."""
    from tpcompile.options import check_threads, device_of

    if not args.measured:
        raise UsageError(
            "--threads applies to --measured only", hint="Choose the workers of a target: --workers"
        )
    check_threads(args.threads, device_of(args.device))


def _check_form(args: argparse.Namespace, option: str) -> None:
    """Refuse a form of the output that has no place for the results of an option."""
    for form in ("text", "kernel"):
        if getattr(args, form):
            raise UsageError(f"{option} prints tables or JSON", got=f"--{form}")


def _write_files(
    args: argparse.Namespace, report: ScheduleReport, measured: StepTrace | None
) -> None:
    """Write the requested trace and picture."""
    from tpcompile.inspect.files import write_file
    from tpcompile.scheduling import ScheduledStep

    wanted = [path for path in (args.trace, args.svg) if path is not None]
    if report.schedule.timing is None:
        for path in wanted:
            sys.stderr.write(f"warning: {path} is not written: the program is not valid\n")
        return
    step = ScheduledStep(report)
    picture = step.svg(args.svg_layers) if args.svg else ""  # before a file is written
    if args.trace:
        write_file(args.trace, step.write_trace if measured is None else measured.write)
    if args.svg:
        write_file(args.svg, lambda file: file.write(picture))
    for path in wanted:
        sys.stderr.write(f"wrote {path}\n")


COMMAND = Command(
    "schedule a decode step on the workers of a machine, and verify it",
    _EXAMPLES,
    _add_arguments,
    _run,
    pauses=True,
)
