"""What notices a mistake: the checker, or the numbers of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from benchmarks.mutations.subjects import Graph
from tpcompile.backends.torch_tp import SimulatedGroup, emit_source, load_rank, run_simulated
from tpcompile.ir import checker
from tpcompile.ir.layout import even_runs
from tpcompile.ir.meta import info_of, parameter_of, parameters
from tpcompile.ir.pieces import evaluate
from tpcompile.ir.simulate import rank_inputs
from tpcompile.runtime.packing import Packed, pack

TOLERANCE = 1e-5
"""Of the logits in fp32, over the largest: two right graphs differ by less."""

_LENGTHS = (9, 1, 6)


@dataclass(frozen=True)
class Verdict:
    """Why a graph is wrong; empty where it seems right."""

    checker: str
    numbers: str
    crash: str = ""
    """What the checker raised instead of saying what is wrong: a mistake of its own."""


def judge(gm: fx.GraphModule, original: Graph) -> Verdict:
    """Both witnesses are heard, so that a mutant which changes nothing is seen too.

    The checker comes first: it sets the types, by which the ranks' modules are made.
    """
    rule = crash = ""
    try:
        rule = next((problem.rule for problem in checker.check_graph(gm)), "")
    except Exception as error:  # kept, reported, and not counted as a refusal
        crash = f"{type(error).__name__}: {error}"
    return Verdict(rule, judge_numbers(gm, original), crash)


def judge_numbers(gm: fx.GraphModule, original: Graph) -> str:
    """How the logits of the ranks differ from those of the right graph, if they do."""
    expected = _expected(original)
    try:
        found = _logits(gm, original)
    except Exception as error:  # whatever a wrong graph makes torch raise says that it is wrong
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if any(logits.shape != expected.shape for logits in found):
        return "logits of another shape"
    if not all(torch.equal(logits, found[0]) for logits in found):
        return "ranks disagree"
    relative = float((found[0] - expected).abs().max() / expected.abs().max())
    return "" if relative <= TOLERANCE else f"off by {relative:.1e}"


@cache
def _expected(original: Graph) -> torch.Tensor:
    """The logits of the right graph."""
    return _logits(original.gm, original)[0]


def _logits(gm: fx.GraphModule, original: Graph) -> list[torch.Tensor]:
    """Of every rank, by the modules that would be shipped."""
    subject, ranks = original.subject, info_of(gm).tp
    group = SimulatedGroup(ranks)
    modules = [
        load_rank(
            emit_source(gm, rank),
            rank,
            {
                str(node.target): evaluate(parameter_of(node).shards[rank], subject.read)
                for node in parameters(gm.graph)
            },
            subject.captured.rotary.fresh(),
            group.rank(rank),
        )
        for rank in range(ranks)
    ]
    batch = tokens(subject.captured.config.vocab_size, original.tp)
    return run_simulated(modules, group, rank_inputs(gm, batch.inputs()))


def tokens(vocabulary: int, tp: int) -> Packed:
    """Three sequences whose ids lie on every rank's part of the vocabulary.

    The first and the last row of each part are among them, where a split goes wrong by one;
    the others lie in between.
    """
    edges = [row for ((start, stop),) in even_runs(vocabulary, tp) for row in (start, stop - 1)]
    count = sum(_LENGTHS)
    between = [row * vocabulary // count + 1 for row in range(count - len(edges))]
    spread = torch.tensor(edges + between)[torch.arange(count) * 7 % count]
    ids = torch.zeros(len(_LENGTHS), max(_LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(_LENGTHS):
        mask[row, :length] = 1
        ids[row, :length], spread = spread[:length], spread[length:]
    return pack(ids, mask)
