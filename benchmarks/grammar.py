"""`python -m benchmarks grammar`: what structured output costs.

It compiles records of several sizes and computes masks with llguidance, which tpcompile uses, and
with xgrammar if it is installed. Then decode steps of a model with random weights run with and
without a structure, in turn. `--schemas` lets a model answer random schemas.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import tpcompile
from benchmarks.counts import not_negative, positive
from benchmarks.grammars.answers import INVALID, REFUSED, answer_schemas
from benchmarks.grammars.libraries import SIDES, timed
from benchmarks.grammars.steps import measure_steps
from benchmarks.grammars.vocabulary import TOKENS, tokenizer_in
from benchmarks.report import write_json

LIMIT_SHARE = 0.03
"""The longest time of a mask, as a part of a step."""
LIMIT_MS = 50.0
"""The longest time to compile a schema of 10 KB after the first one."""
LIMIT_FINISHED = 0.9
"""The least part of answers that finish."""


def main(arguments: Sequence[str]) -> int:
    """Print the tables. Return 1 if a limit is missed."""
    parser = argparse.ArgumentParser("python -m benchmarks grammar", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of the tables")
    add("--directory", type=Path, help="keep the tokenizer here")
    add("--libraries", nargs="+", choices=SIDES, default=list(SIDES), help="the sides to measure")
    add("--sizes", type=positive, nargs="+", default=[1000, 10_000, 100_000], help="bytes")
    add("--turns", type=positive, default=4, help="compilations of each schema, turns of steps")
    add("--model", default="qwen3-0.6b", help="the preset whose steps are measured")
    add("--batch", type=positive, default=1, help="requests of a step")
    add("--tokens", type=not_negative, default=40, help="new tokens of a request; 0: no steps")
    add("--schemas", type=not_negative, default=0, help="random schemas to answer")
    add("--checkpoint", type=Path, help="the model that answers; it needs a tokenizer")
    options = parser.parse_args(arguments)
    if options.schemas and options.checkpoint is None:
        parser.error("--schemas needs --checkpoint")
    measured = measure(options)
    if options.json:
        write_json(measured)
    else:
        show(measured, Console(width=110, highlight=False))
    return 0 if measured["ok"] else 1


def measure(options: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, Any] = {"limits": _limits(), "libraries": {}}
    with ExitStack() as stack:
        directory = options.directory or Path(stack.enter_context(TemporaryDirectory()))
        tokenizer = tokenizer_in(directory)
        for name in options.libraries:
            if find_spec(name) is not None:
                compiled = SIDES[name](tokenizer, TOKENS)
                sizes = [timed(compiled, tokenizer, size, options.turns) for size in options.sizes]
                measured["libraries"][name] = [timing.to_json() for timing in sizes]
        if options.tokens:
            preset = f"preset:{options.model}"
            with tpcompile.compile(
                preset, dtype="bfloat16", max_seq_len=256, random_weights=0
            ) as model:
                steps = measure_steps(
                    model, tokenizer, options.batch, options.tokens, options.turns
                )
                measured["steps"] = {"model": options.model, **steps.to_json()}
    if options.schemas:
        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
        with tpcompile.compile(str(options.checkpoint)) as model:
            ends = answer_schemas(model, tokenizer, options.schemas, 1, model.max_seq_len - 1)
            measured["answers"] = dict(ends)
    return measured | {"ok": all(_verdicts(measured).values())}


def _limits() -> dict[str, float]:
    return {"share": LIMIT_SHARE, "compile_ms": LIMIT_MS, "finished": LIMIT_FINISHED}


def _verdicts(measured: dict[str, Any]) -> dict[str, bool]:
    """Return for each limit whether it is met."""
    compiled = [
        timing for timing in measured["libraries"].get("llguidance", ()) if timing["bytes"] < 11_000
    ]
    claim = f"a schema of 10 KB compiles in {LIMIT_MS:g} ms"
    verdicts = {claim: all(timing["later_ms"] <= LIMIT_MS for timing in compiled)}
    if steps := measured.get("steps"):
        verdicts[f"a mask takes {LIMIT_SHARE:.0%} of a step"] = steps["share"] <= LIMIT_SHARE
    if (ends := measured.get("answers")) is not None:
        answered = sum(ends.values()) - ends.get(REFUSED, 0)
        finished = ends.get("stop", 0) >= LIMIT_FINISHED * answered
        verdicts[f"{LIMIT_FINISHED:.0%} of the answers finish"] = finished
        verdicts["all finished answers are valid"] = not ends.get(INVALID, 0)
    return verdicts


def show(measured: dict[str, Any], console: Console) -> None:
    table = Table(title=f"JSON schemas and a vocabulary of {TOKENS:,} tokens: ms")
    columns = ("compile, first", "later, at most", "mask, mean", "99 %", "at most")
    for name in ("library", "bytes", *columns):
        table.add_column(name, justify="left" if name == "library" else "right")
    for name, sizes in measured["libraries"].items():
        for timing in sizes:
            size, *figures = timing.values()
            table.add_row(name, f"{size:,}", *(f"{figure:.3f}" for figure in figures))
    console.print(table)
    if steps := measured.get("steps"):
        times = (
            f"{steps['token_ms']:.2f} ms if the program chooses the token, "
            f"{steps['logits_ms']:.2f} ms from logits, {steps['structure_ms']:.2f} ms with masks"
        )
        console.print(
            f"{steps['model']}, {steps['threads']} threads, batch {steps['batch']}: a step takes "
            f"{times}, which are {steps['share']:.1%} of a step"
        )
    if (ends := measured.get("answers")) is not None:
        counts = ", ".join(f"{count:,} {end}" for end, count in ends.items())
        console.print(f"answers to {sum(ends.values()):,} random schemas: {counts}")
    for claim, ok in _verdicts(measured).items():
        console.print(f"{claim}: {'met' if ok else 'MISSED'}")
