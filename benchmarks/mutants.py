"""`python -m benchmarks mutants`: detection of mistakes in sharded graphs.

Mistakes are put into sharded graphs of small real models, one at a time. The checker checks each
mutant, and the logits of its ranks are compared with those of the correct graph. Then the checker
must accept all good pairs: each official model at full size at each tp.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.counts import positive
from benchmarks.mutations import KINDS, Kind, Mutant, Verdict, graphs, judge, mutants_of
from benchmarks.mutations.subjects import Graph
from benchmarks.report import write_json

CHECKER_TARGET = 0.95
"""The fraction of the sharding mistakes that the checker alone must refuse."""
FEWEST = 150
HARMLESS_TARGET = 0.01
"""The fraction of mutants that the proof of values may refuse though their numbers are right."""
GOOD_TPS = range(2, 9)


@dataclass(frozen=True)
class Result:
    """A mutant without its graph, and the verdict."""

    kind: Kind
    name: str
    verdict: Verdict

    @property
    def by_checker(self) -> bool:
        return bool(self.verdict.checker)

    @property
    def by_numbers_only(self) -> bool:
        return not self.verdict.checker and bool(self.verdict.numbers)

    @property
    def by_proof_only(self) -> bool:
        """Whether only the expressions of values show the mistake, besides the numbers."""
        return not self.verdict.checker and bool(self.verdict.values)

    @property
    def accepted_wrong(self) -> bool:
        """Whether neither types nor expressions show that the numbers are wrong."""
        return bool(self.verdict.numbers) and not (self.verdict.checker or self.verdict.values)

    @property
    def refused_right(self) -> bool:
        """Whether expressions differ, though the numbers are those of the correct graph."""
        return self.by_proof_only and not self.verdict.numbers

    @property
    def survived(self) -> bool:
        noticed = self.verdict.checker or self.verdict.values or self.verdict.numbers
        return not noticed and not self.kind.may_be_right

    @property
    def unexplained(self) -> bool:
        """Whether the numbers are unchanged, contrary to the kind: this may not be a mistake."""
        return not self.verdict.numbers and not self.kind.silent

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind.name,
            "sharding": self.kind.sharding,
            "name": self.name,
            "checker": self.verdict.checker,
            "numbers": self.verdict.numbers,
            "crash": self.verdict.crash,
            "values": self.verdict.values,
        }


def results(
    count: int, seed: int, on: Sequence[Graph] | None = None, kinds: Iterable[Kind] = KINDS
) -> Iterator[Result]:
    """Yield up to `count` judged mutants of every kind."""
    on = list(graphs()) if on is None else on
    for kind in kinds:
        for mutant in mutants_of(kind, on, count, seed):
            yield _judged(mutant)


def _judged(mutant: Mutant) -> Result:
    return Result(mutant.kind, mutant.name, judge(mutant.gm, mutant.graph))


def refused_pairs(name: str) -> list[str]:
    """Return the refusals of an official model at full size, one line per tp."""
    from tpcompile.errors import CompileError
    from tpcompile.frontend import capture
    from tpcompile.ir.checker import check_graph
    from tpcompile.passes import default_pipeline, run_passes

    torch.set_num_threads(1)
    captured = capture(f"preset:{name}")
    refused = []
    for tp in GOOD_TPS:
        try:
            gm, _ = run_passes(captured.graph, default_pipeline(tp))
        except CompileError as error:
            refused.append(f"{name} tp={tp}: {error}")
            continue
        refused += [f"{name} tp={tp}: {problem}" for problem in check_graph(gm)]
    return refused


def _all_refused(console: Console) -> tuple[int, list[str]]:
    """Check all good pairs, two models at a time. Return their number and the refusals."""
    from tpcompile.presets import DENSE

    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        refusals = track(pool.map(refused_pairs, DENSE), "good pairs", len(DENSE), console=console)
        return len(DENSE) * len(GOOD_TPS), [line for lines in refusals for line in lines]


def shortfalls(judged: Sequence[Result]) -> list[str]:
    """Return the targets that the mutants miss, each as a sentence."""
    sharding = [result for result in judged if result.kind.sharding]
    refused = sum(result.by_checker for result in sharding)
    missed = []
    if refused < CHECKER_TARGET * len(sharding):
        missed.append(f"the checker refuses {refused} of {len(sharding)} sharding mistakes")
    missed += [
        f"the checker raises {result.verdict.crash}: {result.name}"
        for result in judged
        if result.verdict.crash
    ]
    missed += [f"nothing notices {result.name}" for result in judged if result.survived]
    missed += [
        f"the proof of values accepts {result.name}, {result.verdict.numbers}"
        for result in judged
        if result.accepted_wrong
    ]
    harmless = [result.name for result in judged if result.refused_right]
    if len(harmless) > HARMLESS_TARGET * len(judged):
        missed.append(f"the proof of values refuses {len(harmless)} harmless mutants: {harmless}")
    missed += [
        f"the numbers do not change, so it may not be a mistake: {result.name}"
        for result in judged
        if result.unexplained and not result.survived
    ]
    missed += [
        f"the checker accepts {result.name}, {result.verdict.numbers}"
        for result in judged
        if result.kind.strict and result.by_numbers_only
    ]
    produced = {result.kind.name for result in judged}
    missed += [f"no mutant of the kind {k.name!r}" for k in KINDS if k.name not in produced]
    return missed


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a target is missed, otherwise 0."""
    parser = argparse.ArgumentParser("python -m benchmarks mutants", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--seed", type=int, default=0, help="seed for places, ranks and layers")
    parser.add_argument(
        "--per-kind", type=positive, default=12, help="maximum number of mutants of a kind"
    )
    parser.add_argument("--no-pairs", action="store_true", help="skip the good pairs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    progress = Console(stderr=True)
    most = options.per_kind * len(KINDS)
    judged = list(track(results(options.per_kind, options.seed), "mutants", most, console=progress))
    pairs, refused = (0, []) if options.no_pairs else _all_refused(progress)
    missed = shortfalls(judged) + [f"a good pair is refused: {line}" for line in refused]
    if len(judged) < FEWEST:
        missed.append(f"only {len(judged)} mutants, expected at least {FEWEST}")
    if options.json:
        write_json(_json(judged, pairs, refused, missed, options.seed))
    else:
        _print(judged, pairs, refused, missed, options.seed)
    return 1 if missed else 0


def _json(
    judged: Sequence[Result], pairs: int, refused: list[str], missed: list[str], seed: int
) -> dict[str, Any]:
    return {
        "seed": seed,
        "ok": not missed,
        "missed": missed,
        "good_pairs": pairs,
        "refused_pairs": refused,
        "mutants": [result.to_json() for result in judged],
    }


def _print(
    judged: Sequence[Result], pairs: int, refused: list[str], missed: list[str], seed: int
) -> None:
    console = Console(width=110, highlight=False)
    console.print(_table(judged, seed))
    _list(console, "Sharding mistakes that only the numbers show", _unseen(judged))
    silent = [result for result in judged if result.kind.silent and not result.verdict.numbers]
    _list(console, "Refused, though the numbers are correct", _grouped(silent))
    _list(console, "Survivors", [result.name for result in judged if result.survived])
    if pairs:
        console.print(f"\nGood pairs refused: {len(refused)} of {pairs}")
    _list(console, "Missed", missed)
    console.print("\nEvery target is met." if not missed else "\nA target is missed.")


def _unseen(judged: Sequence[Result]) -> list[str]:
    return [
        f"{result.name}: {result.verdict.numbers}"
        for result in judged
        if result.by_numbers_only and result.kind.sharding
    ]


def _grouped(silent: Sequence[Result]) -> list[str]:
    kinds = dict.fromkeys(result.kind for result in silent)
    return [
        f"{kind.name}, {sum(r.kind is kind for r in silent)} mutants: {kind.silent}"
        for kind in kinds
    ]


def _list(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"\n{title}:")
        for line in lines:
            console.print(f"  {line}", markup=False, soft_wrap=True)


_COLUMNS = (
    *("mutants", "checker", "values", "numbers only"),
    *("survived", "checker %", "wrong numbers"),
)


def _table(judged: Sequence[Result], seed: int) -> Table:
    table = Table(title=f"Mutants of sharded graphs, seed {seed}", show_footer=False)
    table.add_column("kind", no_wrap=True)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    for sharding, title in ((True, "all of sharding"), (False, "all others")):
        group = [result for result in judged if result.kind.sharding is sharding]
        for kind in dict.fromkeys(result.kind for result in group):
            table.add_row(kind.name, *_counts([r for r in group if r.kind is kind]))
        table.add_section()
        table.add_row(title, *_counts(group), style="bold")
        table.add_section()
    table.add_row("all", *_counts(judged), style="bold")
    return table


def _counts(group: Sequence[Result]) -> list[str]:
    refused = sum(result.by_checker for result in group)
    return [
        str(len(group)),
        str(refused),
        str(sum(result.by_proof_only for result in group)),
        str(sum(result.accepted_wrong for result in group)),
        str(sum(result.survived for result in group)),
        f"{100 * refused / len(group):.1f}" if group else "",
        str(sum(bool(result.verdict.numbers) for result in group)),
    ]
