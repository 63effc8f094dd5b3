"""`python -m benchmarks proofs`: the proofs of all pipelines of presets, and of random pipelines.

A preset is captured at full size, without weights. Each pipeline must be proved at each tp, or
refused by another rule. Passes that pipelines share run once. Then random pipelines run on tiny
models: each must be proved, with the captured numbers, or be refused with the order named.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import fx

from benchmarks.counts import not_negative
from benchmarks.random_pipelines import KINDS, MODELS, Outcome, outcomes, unproved_of
from benchmarks.report import write_json
from tpcompile.errors import CompileError
from tpcompile.frontend import capture
from tpcompile.passes import Pass, for_ranks, parse_pipeline, run_passes
from tpcompile.passes.pipeline import pipeline_text
from tpcompile.presets import PRESETS
from tpcompile.rewriting.manager import FailedPassError

TPS = range(1, 9)


def _sequence_parallel() -> str:
    text = pipeline_text(parse_pipeline("standard"))
    return text.replace("insert-collectives", "insert-collectives,sequence-parallel")


PIPELINES = {
    "standard": "standard",
    "sequence parallel": _sequence_parallel(),
    "decode": "decode{spans=2}",
    "interleaved": "standard{interleaved=true}",
}


@dataclass(frozen=True)
class Case:
    """A pipeline of a preset at one tp."""

    preset: str
    tp: int
    pipeline: str

    @property
    def passes(self) -> list[Pass]:
        return for_ranks(parse_pipeline(PIPELINES[self.pipeline]), self.tp)

    def __str__(self) -> str:
        return f"{self.preset} tp={self.tp} {self.pipeline}"


@dataclass(frozen=True)
class Result:
    """Whether a pipeline is proved."""

    case: Case
    refused: str = ""
    """The message of another rule that refuses the pipeline."""
    wrong: str = ""
    """The reason why it is not proved, if no other rule refuses it."""

    @property
    def proved(self) -> bool:
        return not self.refused and not self.wrong


def results(presets: Sequence[str]) -> Iterator[Result]:
    """Run all pipelines of presets, one preset after another."""
    for preset in presets:
        graph = capture(f"preset:{preset}").graph
        cases = [Case(preset, tp, pipeline) for tp in TPS for pipeline in PIPELINES]
        yield from _results(graph, 0, [(case, case.passes) for case in cases])


def _results(
    gm: fx.GraphModule, done: int, cases: Sequence[tuple[Case, list[Pass]]]
) -> Iterator[Result]:
    """Run the passes that all cases share, and then those of each group."""
    passes, shortest = cases[0][1], min(len(case_passes) for _, case_passes in cases)
    columns = zip(*(case_passes for _, case_passes in cases), strict=False)
    shared = next((n for n, same in enumerate(columns) if len(set(same)) > 1), shortest)
    try:
        gm, stages = run_passes(gm, passes[done:shared], done=passes[:done])
    except CompileError as error:
        yield from (_refused(case, error) for case, _ in cases)
        return
    unproved = unproved_of(stages)
    groups: dict[tuple[Pass, ...], list[tuple[Case, list[Pass]]]] = {}
    for case, case_passes in cases:
        groups.setdefault(tuple(case_passes[shared : shared + 1]), []).append((case, case_passes))
    for following, group in groups.items():
        if unproved or not following:
            yield from (Result(case, wrong=unproved) for case, _ in group)
        else:
            yield from _results(gm, shared, group)


def _refused(case: Case, error: CompileError) -> Result:
    """Return the result of a refused pipeline, which is wrong if its values are refused."""
    problems = error.problems if isinstance(error, FailedPassError) else []
    by_values = any(problem.rule == "values" for problem in problems)
    return Result(case, wrong=str(error)) if by_values else Result(case, refused=error.message)


def main(arguments: Sequence[str]) -> int:
    """Print the tables. Return 1 if a pipeline has a wrong result, otherwise 0."""
    parser = argparse.ArgumentParser("python -m benchmarks proofs", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="presets; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--random", type=not_negative, default=300, help="random pipelines")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random pipelines")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.presets if name not in PRESETS]
    if unknown:
        parser.error(f"PRESET must be one of {', '.join(PRESETS)}, got {unknown[0]}")
    torch.set_num_threads(1)
    presets, progress = options.presets or list(PRESETS), Console(stderr=True)
    most = len(presets) * len(TPS) * len(PIPELINES)
    proofs = list(track(results(presets), "presets", most, console=progress))
    drawn = outcomes(options.random, options.seed)
    tries = list(track(drawn, "random pipelines", options.random, console=progress))
    if options.json:
        write_json({"presets": [*map(asdict, proofs)], "random": [*map(asdict, tries)]})
    else:
        _print(proofs, tries, options.seed)
    return int(any(r.wrong for r in proofs) or any(o.is_mistake for o in tries))


def _print(proofs: Sequence[Result], tries: Sequence[Outcome], seed: int) -> None:
    console = Console(width=130, highlight=False)
    console.print(_table(proofs))
    if tries:
        console.print(_random_table(tries, seed))
    for title, lines in {
        "Refused by another rule": _grouped(proofs),
        "Not proved": [f"{r.case}: {r.wrong}" for r in proofs if r.wrong],
        "Random pipelines with a mistake": [
            str(outcome) for outcome in tries if outcome.is_mistake
        ],
    }.items():
        console.print(f"{title}: {len(lines)}")
        for line in lines:
            console.print(f"  {line}", markup=False, soft_wrap=True)


def _grouped(proofs: Sequence[Result]) -> list[str]:
    """Return a line for each preset and reason, with the number of pipelines."""
    counts = Counter((result.case.preset, result.refused) for result in proofs if result.refused)
    return [f"{preset}, {count} pipelines: {why}" for (preset, why), count in counts.items()]


def _table(proofs: Sequence[Result]) -> Table:
    title = (
        f"Pipelines that are proved, of tp {TPS.start} to {TPS.stop - 1}; refused by another rule"
    )
    table = Table("preset", title=title)
    for pipeline in PIPELINES:
        table.add_column(pipeline, justify="right")
    for preset, group in groupby(proofs, key=lambda result: result.case.preset):
        preset_proofs = list(group)
        table.add_row(preset, *(_counts(preset_proofs, pipeline) for pipeline in PIPELINES))
    return table


def _counts(proofs: Sequence[Result], pipeline: str) -> str:
    chosen = [result for result in proofs if result.case.pipeline == pipeline]
    refused = sum(bool(result.refused) for result in chosen)
    proved = f"{sum(result.proved for result in chosen)} of {len(chosen)}"
    return f"{proved}; {refused}" if refused else proved


def _random_table(tries: Sequence[Outcome], seed: int) -> Table:
    table = Table("result", title=f"{len(tries)} random pipelines, seed {seed}")
    counts = Counter((outcome.pipeline.model, outcome.kind) for outcome in tries)
    for model in MODELS:
        table.add_column(model, justify="right")
    for kind in KINDS:
        table.add_row(kind, *(str(counts[model, kind]) for model in MODELS))
    return table
