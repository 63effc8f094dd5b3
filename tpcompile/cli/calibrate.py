"""`tpcompile calibrate`: fit the constants of a target to steps measured on this CPU."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_kv_argument,
    add_quantization_arguments,
    add_threads_argument,
    json_text,
    number,
    workers_of,
)
from tpcompile.cli.compiling import Say, progress
from tpcompile.errors import UsageError
from tpcompile.presets import check_model_name

if TYPE_CHECKING:
    from tpcompile.calibration import Calibration, Prediction

_MODEL = "preset:qwen3-0.6b"
_OTHER = "preset:qwen3-1.7b"

_EXAMPLES = """\
  tpcompile calibrate -o mine.json
  tpcompile calibrate -o mine.json --verify
  tpcompile calibrate -o mine.json --threads 2
  tpcompile schedule preset:qwen3-0.6b --target mine.json --measured

The command runs decode steps with random weights, on the native executor or on
a GPU as one Triton kernel, at one context, and writes a target file with the
fitted constants. --verify then predicts and measures other contexts, a batch
of 8 and other shapes, which takes more memory: 4.5 GB with the defaults. Run
it on a quiet machine.
The exit status is 0, or 2 for bad input."""


def _add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("-o", "--output", metavar="F.json", type=Path, required=True, help="the target file")
    add("--model", metavar="MODEL", default=_MODEL, help=f"the model to run; default: {_MODEL}")
    add(
        "--context",
        metavar="C",
        type=number(1, "the context"),
        default=1024,
        help="tokens of the sequence; default: 1024",
    )
    add(
        "--workers",
        metavar="W",
        type=number(1, "the number of workers"),
        help="workers; default: one thread per core, or one per SM",
    )
    add_threads_argument(parser)
    add_quantization_arguments(parser)
    add_kv_argument(parser)
    add(
        "--repeats",
        metavar="N",
        type=number(1, "the number of repeats"),
        default=20,
        help="measured steps per batch size; default: 20",
    )
    add("--device", metavar="D", help="cpu or cuda; default: cpu")
    add("--verify", action="store_true", help="also predict other steps, and measure them")
    add(
        "--other",
        metavar="MODEL",
        default=_OTHER,
        help=f"model with other shapes for --verify; default: {_OTHER}",
    )
    add("--json", action="store_true", help="print JSON instead of tables")


def _run(args: argparse.Namespace) -> Result:
    from tpcompile.inspect.files import check_file, write_file

    for model in (args.model, args.other):
        check_model_name(model)
    if args.output.suffix != ".json":
        raise UsageError("The target file must end in .json", got=str(args.output))
    check_file(args.output)
    with progress() as say:
        from tpcompile.calibration import calibrate, cases_of, verify
        from tpcompile.options import check_threads, device_of
        from tpcompile.vm.targets import target_text

        device = device_of(args.device)
        check_threads(args.threads, device)
        quantized = {name: getattr(args, name) for name in ("weights", "head", "activations", "kv")}
        calibration = calibrate(
            args.model,
            device=device,
            context=args.context,
            name=args.output.stem,
            workers=workers_of(args),
            repeats=args.repeats,
            say=_phase_printer(say),
            **quantized,
        )
        write_file(args.output, lambda file: file.write(target_text(calibration.target)))
        sys.stderr.write(f"wrote {args.output}\n")
        cases = cases_of(args.model, args.other) if args.verify else []
        cases = [replace(case, **quantized) for case in cases]
        steps = verify(
            calibration.target, cases, repeats=args.repeats, device=device, say=_phase_printer(say)
        )
        checked = list(steps)
    text = json_text(_json(calibration, checked)) if args.json else _tables(calibration, checked)
    return Result(text)


def _phase_printer(say: Say) -> Say:
    """Return a callback that shows a phase on a terminal, and prints it elsewhere."""

    def tell(text: str) -> None:
        say(text)
        if not sys.stderr.isatty():
            sys.stderr.write(text + "\n")

    return tell


def _json(calibration: Calibration, checked: list[Prediction]) -> dict[str, Any]:
    return {
        "target": asdict(calibration.target),
        "error": round(calibration.fit.error, 4),
        "step": calibration.trace.to_json(),
        "predictions": [step.to_json() for step in checked],
    }


def _tables(calibration: Calibration, checked: list[Prediction]) -> str:
    from rich.table import Table

    from tpcompile.inspect.tables import table_text

    constants = Table(title="target", title_justify="left", show_header=False)
    constants.add_column(min_width=20)
    constants.add_column(justify="right")
    for name, value in asdict(calibration.target).items():
        constants.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    constants.add_row("error of the fit", f"{calibration.fit.error:.1%}")
    text = table_text(constants) + calibration.trace.table()
    if not checked:
        return text
    table = Table(title="ms per step", title_justify="left")
    table.add_column("step", overflow="fold")
    for column in ("predicted", "measured", "ratio", "median", "undisturbed"):
        table.add_column(column, justify="right")
    for step in checked:
        times = (step.predicted_us, step.measured_us, step.median_us, step.undisturbed_us)
        predicted, *measured = (f"{us / 1000:,.2f}" for us in times)
        table.add_row(step.case.name, predicted, measured[0], f"{step.ratio:.3f}", *measured[1:])
    return text + table_text(table) + _WORDS


_WORDS = """\
measured: the lower quartile of the steps. undisturbed: the simulated step if
each instruction takes the lower quartile of its measured times. If it is far
below the measured step, other processes were running.
"""

COMMAND = Command(
    "fit the constants of a target to steps measured on this machine",
    _EXAMPLES,
    _add_arguments,
    _run,
)
