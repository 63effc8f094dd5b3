"""Guesses from the text by tpcompile, llama.cpp and OpenVINO GenAI, each beside its plain decoding.

All sides read one checkpoint in bf16 and run in turn; while one runs, the others are stopped. Two
checkpoints of the same shapes:

- `editing` copies a document without its errors. All sides generate the same text, so the same
  tokens can be guessed, and tokens per second can be compared.
- `random` has random weights, whose best tokens are often almost equal. It shows how many tokens
  differ from plain decoding of the same side.

benchmarks/README.md says how to install the peers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import kept_checkpoint
from benchmarks.counts import positive
from benchmarks.decode_options import engine_specs, peer_python
from benchmarks.editing import kept_editing
from benchmarks.peers.kinds import Guessed
from benchmarks.peers.side import NotInstalledError, Side, SideError
from benchmarks.peers.words import save_tokenizer
from benchmarks.report import write_json
from tpcompile.guesses import MOST_GUESSES
from tpcompile.presets import preset

OURS = "tpcompile"
KINDS = {
    OURS: "tpcompile-guesses",
    "llama.cpp": "llama.cpp-guesses",
    "OpenVINO GenAI": "openvino-guesses",
}
"""The kind of each side."""
_PYTHONS = (*list(KINDS.values())[1:], "openvino-export")
_CASES = ("editing", "random")


@dataclass
class Figures:
    """What a side has generated from the prompts of a case."""

    plain: list[Guessed] = field(default_factory=list)
    guessed: list[Guessed] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the medians of all turns, and the tokens that differ between both ways."""
        plain, guessed = (median(map(_speed, runs)) for runs in (self.plain, self.guessed))
        tokens = sum(len(run[0]) - 1 for run in self.guessed)
        return {
            "plain_tokens_per_s": round(plain, 2),
            "guessed_tokens_per_s": round(guessed, 2),
            "ratio": round(guessed / plain, 3),
            "tokens_per_step": round(tokens / sum(run[2] for run in self.guessed), 2),
            "tokens": tokens + len(self.guessed),
            "differ": sum(map(_differing, self.plain, self.guessed)),
        }


def _speed(guessed: Guessed) -> float:
    """Return the tokens per second after the first one."""
    tokens, times, _ = guessed
    return (len(tokens) - 1) / (times[-1] - times[0])


def _differing(plain: Guessed, guessed: Guessed) -> int:
    return sum(token != other for token, other in zip(plain[0], guessed[0], strict=True))


@dataclass
class Case:
    """The figures of all sides, and why a side has none."""

    figures: dict[str, Figures]
    missing: dict[str, str]
    failed: dict[str, str]
    expected: list[list[int]] | None
    """The text after each prompt; None if it is not known."""

    @property
    def problems(self) -> list[str]:
        """The sides that failed, wrong tokens, and targets that are missed."""
        problems = [f"{name} failed: {why}" for name, why in self.failed.items()]
        rows = {name: figures.to_json() for name, figures in self.figures.items()}
        if OURS in rows and rows[OURS]["differ"]:
            problems.append(f"{rows[OURS]['differ']} tokens of {OURS} differ with guesses")
        if self.expected is None:
            return problems
        for name, figures in self.figures.items():
            wanted = self.expected * (len(figures.plain) // len(self.expected))
            if [tokens for tokens, *_ in figures.plain] != wanted:
                problems.append(f"{name} does not write the text of the checkpoint")
        speeds = {name: row["guessed_tokens_per_s"] for name, row in rows.items()}
        ahead = [name for name, speed in speeds.items() if speed > speeds.get(OURS, speed)]
        return [*problems, *(f"{name} is ahead of {OURS}" for name in ahead)]


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    progress = Console(stderr=True)
    cases = {}
    with _directory(options.directory) as directory:
        for name in options.cases:
            progress.print(f"writing the checkpoint {name}")
            cases[name] = _measured(name, directory / f"{options.model}-{name}", options, progress)
    _report(cases, options.json)
    return int(any(case.problems for case in cases.values()))


def _measured(name: str, directory: Path, options: argparse.Namespace, progress: Console) -> Case:
    prompts, expected = _prompts(name, directory, options)
    longest = max(map(len, prompts)) + options.new + 2 * options.guesses
    case = Case({}, {}, {}, expected)
    sides: dict[str, Side] = {}
    with ExitStack() as stack:
        for spec in engine_specs(options, KINDS, longest):
            progress.print(f"loading {spec.name}")
            side = stack.enter_context(Side(spec, directory))
            with _losing(spec.name, sides, case):
                side.ready()
                sides[spec.name] = side
                side.pause()
        for turn in range(options.rounds + 1):  # the first one warms up
            progress.print(f"{name}, round {turn}" if turn else "warming up")
            for prompt in prompts:
                for spec_name, side in list(sides.items()):
                    with _losing(spec_name, sides, case):
                        side.resume()
                        runs = [side.guess(prompt, options.new, n) for n in (0, options.guesses)]
                        side.pause()
                        if turn:
                            figures = case.figures.setdefault(spec_name, Figures())
                            figures.plain.append(runs[0])
                            figures.guessed.append(runs[1])
    return case


@contextmanager
def _losing(name: str, sides: dict[str, Side], case: Case) -> Iterator[None]:
    """Leave out a side that is not installed or fails."""
    try:
        yield
    except SideError as error:
        sides.pop(name, None)
        case.figures.pop(name, None)
        (case.missing if isinstance(error, NotInstalledError) else case.failed)[name] = str(error)


def _prompts(
    name: str, directory: Path, options: argparse.Namespace
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Write the checkpoint if it is not there; return prompts, and the texts after them."""
    dice, count = Random(1), options.prompts
    if name == "editing":
        editing = kept_editing(directory, options.model, options.document)
        texts = [editing.document[: options.new]] * count
        return [editing.prompt(options.wrong, dice) for _ in range(count)], texts
    kept_checkpoint(directory, options.model, torch.bfloat16)
    words = int(preset(options.model)["vocab_size"])
    if not (directory / "tokenizer.json").exists():
        save_tokenizer(directory, words)
    return [[dice.randrange(words) for _ in range(options.document)] for _ in range(count)], None


@contextmanager
def _directory(directory: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tpcompile-benchmark-") as temporary:
        yield directory or Path(temporary)


def _report(cases: Mapping[str, Case], as_json: bool) -> None:
    if as_json:
        write_json(
            {
                name: {
                    "sides": {side: figures.to_json() for side, figures in case.figures.items()},
                    "missing": case.missing,
                    "problems": case.problems,
                }
                for name, case in cases.items()
            }
        )
        return
    table = Table("case", "side", "plain, tokens/s", "guessed", "ratio", "per step", "differ")
    for name, case in cases.items():
        for side, figures in case.figures.items():
            row = figures.to_json()
            speeds = (f"{row[key]:.1f}" for key in ("plain_tokens_per_s", "guessed_tokens_per_s"))
            ratios = (f"{row['ratio']:.2f}", f"{row['tokens_per_step']:.2f}")
            table.add_row(name, side, *speeds, *ratios, f"{row['differ']} of {row['tokens']}")
    console = Console()
    console.print(table)
    for name, case in cases.items():
        for side, why in case.missing.items():
            console.print(f"{name}: {side} is not installed: {why}")
        for problem in case.problems:
            console.print(f"{name}: {problem}", style="red")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks speculation-peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", metavar="PRESET", help="default: qwen3-0.6b")
    add("--cases", nargs="+", default=_CASES, choices=_CASES, help="default: both")
    add("--document", type=positive, default=400, metavar="P",
        help="tokens of a prompt; default: 400")  # fmt: skip
    add("--wrong", type=float, default=0.06, metavar="W",
        help="the share of wrong tokens in a document; default: 0.06")  # fmt: skip
    add("--new", type=positive, default=128, metavar="K", help="new tokens; default: 128")
    add("--guesses", type=positive, default=MOST_GUESSES, metavar="G",
        help="the most guesses of a step; default: %(default)s")  # fmt: skip
    add("--prompts", type=positive, default=2, metavar="N", help="default: 2")
    add("--rounds", type=positive, default=3, metavar="N", help="default: 3")
    add("--threads", type=positive, default=os.cpu_count() or 1, metavar="T",
        help="threads of each side; default: one per core")  # fmt: skip
    add("--sides", nargs="+", metavar="NAME", help="only sides whose name contains a NAME")
    add("--directory", type=Path, metavar="D",
        help="keep the checkpoints and their conversions here for later runs")  # fmt: skip
    names = ", ".join(_PYTHONS)
    add("--peer-python", type=peer_python(_PYTHONS), action="append", default=[],
        metavar="NAME=PYTHON",
        help=f"run a side under another interpreter; NAME is one of {names}")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
