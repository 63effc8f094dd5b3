"""Guessed tokens: the cost of rows, and tokens per second with and without guesses, in turn.

The last column has the limits for these figures on a machine with two quiet cores.

Models have random weights, which continue no text sensibly. So the tokens of each text are forced:
the model computes all of them, but the next token is that of the text, whatever the logits say. The
first text is an edit: a license, and then the same license with some words replaced by others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from operator import truediv
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tpcompile
from benchmarks.bandwidth import ReadLoop
from benchmarks.products import CachedProducts
from benchmarks.report import write_json
from tpcompile.cores import cores
from tpcompile.frontend import config_of
from tpcompile.serving import Engine, SamplingParams
from tpcompile.serving.sampling import Chosen
from tpcompile.serving.speculation import Wanted
from tpcompile.vm.program.instruction import WeightInstruction

_DOCUMENT = Path(__file__).parent.parent / "LICENSE"
_WORDS = 400
_RENAMED = ("by", "shall", "copyright", "entity")
"""The words of the document that the edit replaces."""
_PARTS = ("rows", "texts")
_MODELS = ["qwen3-0.6b", "qwen3-1.7b"]
_CONTEXT = 64
_RIGHT = 0.8
_NUMBERS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""The numbers of rows, and of sequences."""
_SHARE = "8 rows, share of the limit"
_ROWS, _EDIT, _ORACLE = "rows relative to sequences", "prompt:8", f"right {_RIGHT:.0%}, 4 guesses"
_NEVER, _EIGHT_NEVER = "right never", "8 sequences, right never"
_PLAIN, _EIGHT_PLAIN = "plain", "8 sequences, plain"
_LIMITS = {
    ("bf16", "8 rows"): "≤ 1.25",
    ("int4", _SHARE): "≥ 0.8",
    ("bf16", _EDIT): "≥ 2.0",
    ("bf16", _ORACLE): "≥ 2.2",
    ("int4", _ORACLE): "≥ 1.5",
    **{
        (weights, label): limit
        for weights in ("bf16", "int4")
        for label, limit in {
            **{f"{number} {_ROWS}": "≤ 1.1" for number in _NUMBERS},
            _NEVER: "≥ 0.97",
            _EIGHT_NEVER: "≥ 0.98",
        }.items()
    },
}
"""The limits of ratios, by weights and by what is measured."""


@dataclass(frozen=True)
class Result:
    """The median of all turns."""

    model: str
    weights: str
    what: str
    ms: float
    """Milliseconds per step, or per token of a sequence."""
    ratio: float
    """Of steps, the time relative to one row; of tokens, the speed relative to plain decoding, as
    the median of adjacent pairs.

    The share of a limit is the larger of the time to read the weights and that of their products,
    over the time of a step; both are measured in the run.
    """
    accepted: float | None = None
    """The share of guesses that were accepted."""


class Guesses:
    """A drafter that knows the texts. A guess is right with a probability."""

    free = True

    def __init__(self, texts: Mapping[int, Sequence[int]], right: float, most: int) -> None:
        """`texts` have the first token of a prompt as key."""
        self.most = most
        self._texts, self._right, self._dice = texts, right, Random(0)

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Return the next tokens of the texts, some of them wrong."""
        return [
            [
                token if self._dice.random() < self._right else token + 1
                for token in self._texts[request.tokens[0]][len(request.tokens) :][: request.most]
            ]
            for request in wanted
        ]

    def forget(self, key: Any) -> None:
        """Do nothing: texts do not change."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    progress = Console(stderr=True)
    results: list[Result] = []
    for name, weights in product(options.models, options.weights):
        measured = list(_measured(name, weights, options, progress))
        if not options.json:
            Console().print(_table(measured))
        results += measured
    if options.json:
        write_json([asdict(result) for result in results])
    return 0


def _table(results: Sequence[Result]) -> Table:
    table = Table("model", "weights", "", "ms", "ratio", "accepted", "limit")
    for result in results:
        share = "" if result.accepted is None else f"{result.accepted:.2f}"
        limit = _LIMITS.get((result.weights, result.what), "")
        numbers = f"{result.ms:.2f}", f"{result.ratio:.2f}", share, limit
        table.add_row(result.model, result.weights, result.what, *numbers)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks speculation", description=__doc__)
    add = parser.add_argument
    add("models", nargs="*", default=_MODELS, help=f"presets; default: {' '.join(_MODELS)}")
    add("--weights", nargs="+", default=["bf16", "int4"], help="default: bf16 int4")
    add("--layers", type=int, help="default: all of them")
    add("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="default: all of them")
    add("--turns", type=int, default=5, help="default: %(default)s")
    add("--new", type=int, default=128, help="tokens of a turn; default: %(default)s")
    add("--json", action="store_true", help="print all results as JSON")
    return parser


def _measured(
    name: str, weights: str, options: argparse.Namespace, progress: Console
) -> Iterator[Result]:
    config = config_of(f"preset:{name}")
    config.num_hidden_layers = options.layers or config.num_hidden_layers
    few = None if weights == "bf16" else weights
    with tpcompile.compile(
        config, random_weights=0, max_seq_len=2048, max_batch=16, weights=few,
        dtype=torch.bfloat16, backend="native",
    ) as model:  # fmt: skip
        if "rows" in options.parts:
            for label, ms, ratio in _rows(model, options.turns, progress):
                yield Result(name, weights, label, ms, ratio)
            if options.layers is None:
                yield Result(name, weights, _SHARE, *_share(model, name, few, options.turns))
        if "texts" in options.parts:
            for label, ms, ratio, accepted in _speeds(model, options, progress):
                yield Result(name, weights, label, ms, ratio, accepted)


def _rows(model: Any, turns: int, progress: Console) -> Iterator[tuple[str, float, float]]:
    """Measure steps of several rows of a sequence, and of as many sequences.

    Ratios are medians of adjacent steps: relative to one row, and of rows relative to sequences.
    """
    times: dict[int, list[tuple[float, float, float]]] = {number: [] for number in _NUMBERS}
    for turn, number in track(
        list(product(range(turns + 1), _NUMBERS)), "steps of rows", console=progress
    ):
        rows, alone = _step(model, 1, number), _step(model, 1, 1)
        measured = rows, alone, _step(model, number, 1)
        if turn:  # the first one makes programs
            times[number].append(measured)
    for number, steps in times.items():
        several, one, sequences = zip(*steps, strict=True)
        for kind, seconds in (("rows", several), ("sequences", sequences)):
            ratio = median(map(truediv, seconds, one))
            yield f"{number} {kind}", median(seconds) * 1e3, ratio
        ratio = median(map(truediv, several, sequences))
        yield f"{number} {_ROWS}", median(several) * 1e3, ratio


def _share(model: Any, name: str, few: str | None, turns: int) -> tuple[float, float]:
    """Return the time that a step of eight rows cannot be below, and its share of a step's time."""
    instructions = model.program.program.instructions
    read = sum(
        instruction.traffic
        for instruction in instructions
        if isinstance(instruction, WeightInstruction)
    )
    loop = ReadLoop(1 << 28)
    limits: list[float] = []
    shares: list[float] = []
    with CachedProducts(name, torch.bfloat16, 8, cores(), few) as products:
        for _ in range(turns):
            limits.append(max(read / loop.bandwidth(), products.seconds()))
            shares.append(limits[-1] / _step(model, 1, 8))
    return median(limits) * 1e3, median(shares)


def _step(model: Any, batch: int, rows: int, steps: int = 12) -> float:
    """Return the median time of a step."""
    dice = torch.Generator().manual_seed(0)
    cache, most = model.new_cache(), model.config.vocab_size
    prompt = torch.randint(0, most, (batch, _CONTEXT), generator=dice)
    model(prompt, past_key_values=cache, logits_to_keep=1)
    tokens = torch.randint(0, most, (batch, rows), generator=dice)
    cache.guesses = model.guesses if rows > 1 else None
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        model(tokens, past_key_values=cache, logits_to_keep=rows)
        times.append(time.perf_counter() - begun)
        cache.crop(-rows)
    return median(times)


def _speeds(
    model: Any, options: argparse.Namespace, progress: Console
) -> Iterator[tuple[str, float, float, float | None]]:
    """Measure texts without and with guesses, as adjacent pairs."""
    edit = _edit(options.new, model.config.vocab_size)
    oracle = Guesses(edit, _RIGHT, 4)
    eight = {first: [first, *next(iter(edit.values()))[1:]] for first in range(1, 9)}
    sides: dict[str, tuple[str, dict[int, list[int]], Any]] = {
        _EDIT: (_PLAIN, edit, "prompt:8"),
        _ORACLE: (_PLAIN, edit, oracle),
        _NEVER: (_PLAIN, edit, Guesses(edit, 0.0, 8)),
        "8 sequences, prompt:8": (_EIGHT_PLAIN, eight, "prompt:8"),
        _EIGHT_NEVER: (_EIGHT_PLAIN, eight, Guesses(eight, 0.0, 8)),
    }
    pairs: dict[str, list[tuple[float, float]]] = {label: [] for label in sides}
    counts = dict.fromkeys(sides, (0, 0))
    for turn, (label, (_, texts, speculate)) in track(
        list(product(range(options.turns + 1), sides.items())), "texts", console=progress
    ):
        before = model.guesses.drafted, model.guesses.accepted
        ways = (None, speculate) if turn % 2 else (speculate, None)
        seconds = {way: _text(model, texts, way, options.new) for way in ways}
        if turn:
            pairs[label].append((seconds[None], seconds[speculate]))
            new = model.guesses.drafted - before[0], model.guesses.accepted - before[1]
            counts[label] = counts[label][0] + new[0], counts[label][1] + new[1]
    for plain in (_PLAIN, _EIGHT_PLAIN):
        own = [label for label, side in sides.items() if side[0] == plain]
        yield plain, median(pair[0] for label in own for pair in pairs[label]) * 1e3, 1.0, None
        for label in own:
            drafted, accepted = counts[label]
            share = accepted / drafted if drafted else None
            ratio = median(without / guessed for without, guessed in pairs[label])
            yield label, median(pair[1] for pair in pairs[label]) * 1e3, ratio, share


def _edit(new: int, vocabulary: int) -> dict[int, list[int]]:
    """Return a document, its edit, and so many tokens of the edit."""
    words = _DOCUMENT.read_text(encoding="utf-8").split()[:_WORDS]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words), 100)}
    document = [numbers[word] for word in words]
    other = {numbers[word]: vocabulary - 1 - number for number, word in enumerate(_RENAMED)}
    edited = [other.get(token, token) for token in document]
    return {99: [99, *document, 98, *edited[: new + 1]]}


def _text(model: Any, texts: Mapping[int, Sequence[int]], speculate: Any, new: int) -> float:
    """Return the seconds per token of a sequence after the first one, with forced tokens."""
    with Engine(model, speculate=speculate, max_batch=16) as engine:
        run = engine._runs.run

        def forced(plan: Any) -> Any:
            for pieces, results in run(plan):
                yield (
                    pieces,
                    [
                        (
                            piece,
                            [
                                Chosen(texts[piece.sequence.tokens[0]][place])
                                for place in range(
                                    len(piece.sequence.tokens),
                                    len(piece.sequence.tokens) + 1 + len(piece.guesses),
                                )
                            ],
                        )
                        for piece, _ in results
                    ],
                )

        engine._runs.run = forced  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        handles = [engine.add(text[: len(text) - new - 1], params) for text in texts.values()]
        while any(not list(handle.ready()) for handle in handles):
            engine.step()
        begun = time.perf_counter()
        for handle in handles:
            handle.result()
        return (time.perf_counter() - begun) / (new - 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
