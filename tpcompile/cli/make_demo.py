"""`tpcompile make-demo`: a small checkpoint with sensible text, trained on the spot."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator

from tpcompile.cli.command import Command, Parser, Result, number
from tpcompile.runtime.new_directory import check_new_directory

_EXAMPLES = """\
  tpcompile make-demo demo                 a minute on two cores
  tpcompile make-demo demo-7 --seed 7      other weights
  tpcompile make-demo rough --steps 50     sooner, and worse text"""


def _add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", help="where the checkpoint goes: new, or an empty directory"
    )
    parser.add_argument(
        "--seed",
        metavar="SEED",
        type=number(0, "a seed"),
        default=0,
        help="of the weights and of the stories it learns; default: 0",
    )
    parser.add_argument(
        "--steps",
        metavar="K",
        type=number(1, "a number of steps"),
        help="training steps; default: as many as faultless text takes, about a minute",
    )


def _run(args: argparse.Namespace) -> Result:
    check_new_directory(args.directory)  # before torch is imported
    from tpcompile.demo.model import STEPS, make_demo

    steps = STEPS if args.steps is None else args.steps
    with _bar(steps) as follow:
        loss = make_demo(args.directory, seed=args.seed, steps=steps, follow=follow)
    return Result(f"{args.directory}: a Qwen3 of {steps} steps, final loss {loss:.4f}\n")


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[Callable[[int, float], None] | None]:
    """A progress bar with the loss, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeftColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps, loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeLeftColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))
        yield lambda done, loss: progress.update(task, completed=done, loss=loss)


COMMAND = Command(
    "train a tiny Qwen3 and save it as a checkpoint",
    _EXAMPLES,
    _add_arguments,
    _run,
)
