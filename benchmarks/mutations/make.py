"""Mutants of each kind, spread over the graphs and derived from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from benchmarks.mutations.draft import Draft, UnfitError
from benchmarks.mutations.kinds import Kind, Mutate
from benchmarks.mutations.subjects import Graph
from tpcompile.rewriting.manager import clone

_ROUNDS = 3
"""The number of times that each graph is tried for one kind."""


@dataclass(frozen=True)
class Mutant:
    """A graph with one mistake in it."""

    kind: Kind
    graph: Graph
    what: str
    gm: fx.GraphModule

    @property
    def name(self) -> str:
        return f"{self.kind.name} [{self.graph.name}]: {self.what}"


def mutants_of(kind: Kind, graphs: Sequence[Graph], count: int, seed: int) -> Iterator[Mutant]:
    """Yield up to `count` different mutants of one kind."""
    dice = random.Random(f"{seed} {kind.name}")
    names: set[str] = set()
    graphs = [graph for graph in graphs if graph.pipeline in kind.pipelines]
    for _ in range(_ROUNDS):
        for graph in dice.sample(graphs, len(graphs)):
            if len(names) == count:
                return
            turn = len(names) % len(kind.ways)
            ways = (*kind.ways[turn:], *kind.ways[:turn])
            mutant = _first_fit(kind, ways, graph, dice)
            if mutant is not None and mutant.name not in names:
                names.add(mutant.name)
                yield mutant


def _first_fit(
    kind: Kind, ways: Sequence[Mutate], graph: Graph, dice: random.Random
) -> Mutant | None:
    """Return a mutant made in the first way that fits the graph, or None."""
    for mutate in ways:
        draft = Draft(clone(graph.gm), random.Random(dice.random()))
        try:
            return Mutant(kind, graph, mutate(draft), draft.gm)
        except UnfitError:
            continue
    return None
