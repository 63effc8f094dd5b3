"""Guessed tokens change no bit: every token and log-probability beside plain decoding.

Small models of several kinds, dtypes and numbers of ranks continue the same requests without
guesses and with guesses of each kind, also while requests are aborted and preempted. A preempted
sequence is computed again as a prompt, which may round otherwise in 16 bits: its differences are
listed apart, and are not failures. The status is 1 if anything else differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

import tpcompile
from benchmarks.counts import positive
from benchmarks.oracle import Oracle
from benchmarks.report import write_json
from tpcompile.presets import preset
from tpcompile.serving import Engine, SamplingParams
from tpcompile.serving.requests import Handle

KINDS = {"dense": "tiny-qwen3", "hybrid": "tiny-qwen3.5", "experts": "tiny-qwen3-moe"}
"""The presets by kind."""
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "int4": {"dtype": torch.bfloat16, "weights": "int4:32"},
    "int8 KV": {"dtype": torch.bfloat16, "kv": "int8"},
}
"""The options of `compile` by name."""
_LENGTH = 160
SIZES = {"chunk": 32, "max_tokens_per_step": 64}
SIZES_WITH_STATES = {"chunk": 64, "max_tokens_per_step": 128}
_FEW_KV_TOKENS = 192
"""So few that sequences are preempted."""
_REQUESTS = 20
"""The requests that are compared before the number of tokens is looked at again."""
_BEFORE_ABORTS = 5
"""The steps before requests are aborted."""

Request = tuple[list[int], SamplingParams]
Results = dict[int, list[tuple[list[Any], str | None]]]
"""The tokens of the continuations of each request, and why each has ended, by its number."""


@dataclass(frozen=True)
class Result:
    """A comparison of guesses of one kind with plain decoding."""

    model: str
    form: str
    tp: int
    guesses: str
    tokens: int = 0
    logprobs: int = 0
    differ: int = 0
    """The tokens that differ, or whose log-probabilities do."""
    recomputed: int = 0
    """The tokens of preempted requests, which are not among `tokens`."""
    recomputed_differ: int = 0
    drafted: int = 0
    accepted: int = 0


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a token or a log-probability differs."""
    options = _parser().parse_args(arguments)
    cases = [
        (kind, form, options.tp[(row + column) % len(options.tp)])
        for row, kind in enumerate(options.kinds)
        for column, form in enumerate(options.forms)
    ]
    results: list[Result] = []
    for case in cases:
        begun = time.perf_counter()
        results += compared(*case, options.tokens, options.seed)
        seconds = time.perf_counter() - begun
        sys.stderr.write(f"{', '.join(map(str, case))} ranks: {seconds:.0f} s\n")
    if options.json:
        write_json([asdict(result) for result in results])
    else:
        _print(results)
    return int(any(result.differ for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks speculation-bits", description=__doc__)
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="default: all of them")
    add("--forms", nargs="+", choices=FORMS, default=[*FORMS], help="default: all of them")
    add(
        "--tp", nargs="+", type=positive, default=[1, 2, 3],
        help="numbers of ranks, which kinds and forms take in turn; default: 1 2 3",
    )  # fmt: skip
    add(
        "--tokens", type=positive, default=4200,
        help="the least number of compared tokens of a model; default: %(default)s",
    )  # fmt: skip
    add("--seed", type=int, default=1, help="seed of the requests; default: %(default)s")
    add("--json", action="store_true", help="print all results as JSON")
    return parser


def _print(results: Sequence[Result]) -> None:
    table = Table("model", "guesses", "tokens", "logprobs", "differ", "recomputed", "accepted")
    for result in results:
        table.add_row(
            f"{result.model}, {result.form}, tp={result.tp}", result.guesses, *_shown(result)
        )
    sums = [sum(row) for row in zip(*(_counts(result) for result in results), strict=True)]
    table.add_row("all", "", *_shown(Result("", "", 0, "", *sums)))
    Console(width=100).print(table)


def _shown(result: Result) -> list[str]:
    recomputed = f"{result.recomputed}, {result.recomputed_differ} differ"
    accepted = f"{result.accepted} of {result.drafted}"
    return [*map(str, _counts(result)[:3]), recomputed, accepted]


def _counts(result: Result) -> list[int]:
    """Return the counts of a result, which follow its names."""
    return [*asdict(result).values()][4:]


def compared(kind: str, form: str, tp: int, tokens: int, seed: int) -> list[Result]:
    """Compare so many tokens of a model, with guesses of each kind in turn."""
    eager = with_wide_weights(KINDS[kind], FORMS[form]["dtype"])
    options = {name: value for name, value in FORMS[form].items() if name != "dtype"}
    sums: dict[str, list[int]] = {}
    with tpcompile.compile(eager, tp=tp, max_seq_len=_LENGTH, **options) as model:
        dice = Random(seed)
        while sum(counts[0] for counts in sums.values()) < tokens:
            wanted = requests(dice, _REQUESTS, eager.config.vocab_size)
            for label, counts in _each_kind(model, wanted, dice):
                before = sums.get(label, [0] * len(counts))
                sums[label] = [sum(pair) for pair in zip(before, counts, strict=True)]
    return [Result(kind, form, tp, label, *counts) for label, counts in sums.items()]


def with_wide_weights(name: str, dtype: torch.dtype) -> Any:
    """Return an eager preset with spread-out weights, so that its text does not repeat itself."""
    config = AutoConfig.for_model(**{**preset(name), "dtype": "float32"})
    make: Any = AutoModelForCausalLM.from_config
    model = make(config).eval()
    dice = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.dim() == 1
            values = torch.randn(parameter.shape, generator=dice) * (0.1 if scale else 0.3)
            parameter.copy_(values + scale)
    return model.to(dtype)


def requests(dice: Random, number: int, vocabulary: int, most: int = 40) -> list[Request]:
    """Return prompts of parts that repeat, with all kinds of options."""
    drawn = []
    for seed in range(number):
        part = [dice.randrange(vocabulary) for _ in range(dice.randrange(1, 12))]
        options: dict[str, Any] = dice.choice(
            [
                {},
                {"logprobs": 2},
                {"temperature": 0.8, "seed": seed, "logprobs": 0},
                {"temperature": 1.2, "seed": seed, "top_k": 20, "n": 2, "logprobs": 1},
                {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_tokens": 3}
                | {"logprobs": 0},
            ]
        )
        new = max(dice.randrange(1, most), options.get("min_tokens", 1))
        drawn.append((part * dice.randrange(1, 5), SamplingParams(max_tokens=new, **options)))
    return drawn


def answers(
    model: Any,
    wanted: Sequence[Request],
    *,
    aborted: Collection[int] = (),
    preempted: set[int] | None = None,
    **options: Any,
) -> Results:
    """Return the results of requests that are not aborted.

    The numbers of requests that were preempted are added to `preempted`.
    """
    sizes = SIZES_WITH_STATES if model.keeps_states else SIZES
    with Engine(model, **sizes, **options) as engine:
        take_equal_times(engine)
        handles = [engine.add(*request) for request in wanted]
        if preempted is not None:
            _record(engine, lambda handle: preempted.add(handles.index(handle)))
        if aborted:
            for _ in range(_BEFORE_ABORTS):
                engine.step()
            for number in aborted:
                handles[number].abort()
        results = {
            number: [(choice.chosen, choice.finish) for choice in handle.result()]
            for number, handle in enumerate(handles)
            if number not in aborted
        }
        assert engine.scheduler.blocks.available == engine.scheduler.limits.blocks
        assert engine.scheduler.states.available == engine.scheduler.limits.states
    return results


def take_equal_times(engine: Engine) -> None:
    """Let all steps count as equally long, so that guesses do not depend on the machine's load."""
    speculation: Any = engine._speculation
    if speculation is not None:
        timed = speculation.timed
        speculation.timed = lambda pieces, _: timed(pieces, 0.01)


def _record(engine: Engine, tell: Callable[[Handle], None]) -> None:
    """Call `tell` with each request that loses its blocks."""
    plan = engine.scheduler.plan

    def recorded() -> Any:
        planned = plan()
        for sequence in planned.preempted:
            tell(engine._work._all[sequence].handle)
        return planned

    engine.scheduler.plan = recorded  # type: ignore[method-assign]


def texts(wanted: Sequence[Request], results: Results) -> list[list[int]]:
    """Return prompts with their continuations."""
    return [
        [*wanted[number][0], *(choice.token for choice in chosen)]
        for number, result in results.items()
        for chosen, _ in result
    ]


def _each_kind(
    model: Any, wanted: Sequence[Request], dice: Random
) -> Iterator[tuple[str, list[int]]]:
    """Yield the counts of `Result` for guesses of each kind, and engine mixes."""
    plain = answers(model, wanted)
    known = texts(wanted, plain)
    seeds = count(dice.randrange(1000))

    def oracle(right: float) -> Oracle:
        return Oracle(known, right, seed=next(seeds))

    aborted = dice.sample(range(len(wanted)), 3)
    sides: dict[str, dict[str, Any]] = {
        "prompt:8": {"speculate": "prompt:8", "max_batch": 3},
        "a model": {"speculate": model, "max_batch": 4},
        "right 9 of 10": {"speculate": oracle(0.9), "max_batch": 4},
        "right 1 of 2": {"speculate": oracle(0.5)},
        "right never": {"speculate": oracle(0.0), "max_batch": 2},
        "with aborts": {"speculate": oracle(0.8), "aborted": aborted},
        "with preemption": {"speculate": oracle(0.8), "kv_tokens": _FEW_KV_TOKENS},
    }
    for label, options in sides.items():
        preempted: set[int] = set()
        before = model.steps
        guessed = answers(model, wanted, preempted=preempted, **options)
        steps = [now - past for now, past in zip(model.steps, before, strict=True)]
        yield label, [*_compared(plain, guessed, preempted), *steps[2:]]


def _compared(plain: Results, guessed: Results, preempted: Collection[int]) -> list[int]:
    """Return the counts of tokens, log-probabilities and differences, and of preempted ones."""
    counts = {False: [0, 0, 0], True: [0, 0, 0]}
    for number, results in guessed.items():
        sums = counts[number in preempted]
        for (chosen, finish), (expected, end) in zip(results, plain[number], strict=True):
            sums[0] += len(expected)
            sums[1] += sum(choice.logprob is not None for choice in expected)
            pairs = zip(chosen, expected, strict=False)
            sums[2] += sum(choice != other for choice, other in pairs)
            sums[2] += abs(len(chosen) - len(expected)) + (finish != end)
    preempted_sums = counts[True]
    return [*counts[False], preempted_sums[0], preempted_sums[2]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
