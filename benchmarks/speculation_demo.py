"""The demo model: tokens per second without guesses, with those from the text, and of its draft.

All sides continue the same prompts in an engine, in turn, and must give the same tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import tpcompile
from benchmarks.counts import positive
from benchmarks.report import write_json
from tpcompile.demo.model import DRAFT
from tpcompile.demo.text import PEOPLE
from tpcompile.serving import Engine, SamplingParams

_WARM_UP = 32
"""The tokens before the clock starts. Programs are made in the turn that is not counted."""


@dataclass(frozen=True)
class Result:
    """The median of all turns."""

    sequences: int
    guesses: str
    tokens_per_s: float
    """The tokens of all sequences."""
    ratio: float
    """The speed relative to that without guesses."""
    accepted: float | None
    """The share of guesses that were accepted."""


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.new <= _WARM_UP:
        parser.error(f"--new must be greater than {_WARM_UP}, got {options.new}")
    draft = options.draft or options.directory / DRAFT
    tokenizer = AutoTokenizer.from_pretrained(options.directory)
    with (
        tpcompile.compile(str(options.directory), tp=options.tp) as model,
        tpcompile.compile(str(draft)) as small,
    ):
        sides = {"none": None, "prompt:8": "prompt:8", "draft": small}
        results = [
            result
            for count in options.sequences
            for result in _measured(model, tokenizer, count, sides, options)
        ]
    if options.json:
        write_json([asdict(result) for result in results])
        return 0
    table = Table("sequences", "guesses", "tokens/s", "ratio", "accepted")
    for result in results:
        share = "" if result.accepted is None else f"{result.accepted:.0%}"
        row = (str(result.sequences), result.guesses, f"{result.tokens_per_s:.0f}")
        table.add_row(*row, f"{result.ratio:.2f}", share)
    Console().print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks speculation-demo", description=__doc__)
    add = parser.add_argument
    add("directory", type=Path, help="a directory that tpcompile make-demo has made")
    add("--draft", type=Path, help="another draft model; default: DIRECTORY/draft")
    add("--tp", type=positive, default=1, help="default: %(default)s")
    add("--sequences", nargs="+", type=positive, default=[1, 8], help="default: 1 8")
    add("--new", type=positive, default=256, help="tokens of a sequence; default: %(default)s")
    add("--turns", type=positive, default=5, help="default: %(default)s")
    add("--json", action="store_true", help="print all results as JSON")
    return parser


def _measured(
    model: Any, tokenizer: Any, count: int, sides: dict[str, Any], options: argparse.Namespace
) -> Iterator[Result]:
    prompts = [tokenizer(f"{person.name} is a")["input_ids"] for person in PEOPLE[:count]]
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    counts = dict.fromkeys(sides, (0, 0))
    plain: list[list[int]] = []
    for turn in range(options.turns + 1):
        for name, speculate in sides.items():
            before = model.steps
            speed, tokens = _speed(model, prompts, speculate, options.new)
            plain = plain or tokens
            if tokens != plain:
                raise AssertionError(f"guesses={name} have changed tokens")
            if turn:  # the first one makes programs
                speeds[name].append(speed)
                drafted = counts[name][0] + model.steps.drafted - before.drafted
                accepted = counts[name][1] + model.steps.accepted - before.accepted
                counts[name] = drafted, accepted
    for name, rates in speeds.items():
        drafted, accepted = counts[name]
        share = accepted / drafted if drafted else None
        yield Result(count, name, median(rates), median(rates) / median(speeds["none"]), share)


def _speed(
    model: Any, prompts: Sequence[list[int]], speculate: Any, new: int
) -> tuple[float, list[list[int]]]:
    """Return the tokens per second after the first ones of all sequences, and all tokens."""
    with Engine(model, speculate=speculate) as engine:
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        handles = [engine.add(prompt, params) for prompt in prompts]
        tokens: list[list[int]] = [[] for _ in handles]
        begun, early = 0.0, 0
        while engine.step():
            for handle, sequence in zip(handles, tokens, strict=True):
                sequence += [event.chosen.token for event in handle.ready() if event.chosen]
            if not begun and all(len(sequence) >= _WARM_UP for sequence in tokens):
                begun, early = time.perf_counter(), sum(map(len, tokens))
        seconds = time.perf_counter() - begun
        return (sum(map(len, tokens)) - early) / seconds, tokens


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
