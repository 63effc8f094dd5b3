"""`tpcompile make-demo`: train a small model that writes sensible text, and its draft."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator

from tpcompile.cli.command import Command, Parser, Result, choice, number
from tpcompile.runtime.new_directory import check_new_directory

_EXAMPLES = """\
  tpcompile make-demo demo                    a minute on two cores
  tpcompile generate demo --speculate demo/draft --prompt "Anna is"
  tpcompile make-demo demo-7 --seed 7         different weights
  tpcompile make-demo rough --steps 50        faster, with worse text
  tpcompile make-demo linear --arch qwen3.5   with linear attention
  tpcompile make-demo mixed --arch qwen3-moe  with experts
  tpcompile make-demo tools --tools           answers in chats, and calls tools"""

_NAMES = {"qwen3": "Qwen3", "qwen3-moe": "Qwen3-MoE", "qwen3.5": "Qwen3.5"}
"""The models by the value of --arch."""


def _add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", help="directory of the checkpoint, new or empty"
    )
    parser.add_argument(
        "--arch",
        metavar="A",
        type=choice(*_NAMES),
        default="qwen3",
        help="qwen3, qwen3-moe with six experts per layer, or qwen3.5 with three layers of linear "
        "attention; default: qwen3",
    )
    parser.add_argument(
        "--tools",
        action="store_true",
        help="train a Qwen3 that answers in chats and calls get_weather(city), get_time(city) and "
        "add(a, b), instead of one that writes stories",
    )
    parser.add_argument(
        "--seed",
        metavar="SEED",
        type=number(0, "the seed"),
        default=0,
        help="seed of the weights and of the training stories; default: 0",
    )
    parser.add_argument(
        "--steps",
        metavar="K",
        type=number(1, "the number of steps"),
        help="number of training steps; default: enough for faultless text, one to two minutes",
    )


def _run(args: argparse.Namespace) -> Result:
    check_new_directory(args.directory)  # before torch is imported
    from tpcompile.demo.model import DRAFT, default_steps, make_demo

    steps = args.steps or default_steps(args.arch, args.tools)
    with _bar(steps) as follow:
        loss = make_demo(args.directory, args.seed, steps, follow, args.arch, args.tools)
    trained = f"a {_NAMES[args.arch]} trained for {steps} steps, final loss {loss:.4f}"
    draft = "" if args.tools else f"; its draft is in {args.directory}/{DRAFT}"
    return Result(f"{args.directory}: {trained}{draft}\n")


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[Callable[[str, int, float], None] | None]:
    """Show a progress bar of each model with the loss on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeftColumn

    columns = (
        TextColumn("training the {task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps{task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeLeftColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def follow(part: str, done: int, loss: float) -> None:
            if part not in tasks:
                tasks[part] = progress.add_task(part, total=steps, loss="")
            progress.update(tasks[part], completed=done, loss=f", loss {loss:.3f}")

        yield follow


COMMAND = Command(
    "train a tiny model and its draft, and save them",
    _EXAMPLES,
    _add_arguments,
    _run,
)
