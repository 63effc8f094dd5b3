"""Verdicts on mutants, from the checker and from the numbers of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from benchmarks.mutations.steps import Inputs, caches_for, decodes, kept_inputs, steps_of
from benchmarks.mutations.subjects import Graph
from tpcompile.backends.torch_tp import emit_sources, load_rank, run_simulated
from tpcompile.comm import SimulatedGroup
from tpcompile.ir import checker
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import parameter_of, parameters
from tpcompile.ir.ops import DECODE_OPS
from tpcompile.ir.pieces import evaluate
from tpcompile.ir.simulate import logits_of, materialise, run_ranks
from tpcompile.ir.values.expressions import Expressions, GraphValues, UnprovedError
from tpcompile.passes import PASSES
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.proving import differs, rewrites_of

REWRITES = frozenset(rewrite for kind in PASSES.values() for rewrite in rewrites_of(kind))
"""The rewrites that passes declare."""
TOLERANCE = 1e-5
"""Limit on the error of fp32 logits, relative to the largest. Correct graphs differ by less."""


@dataclass(frozen=True)
class Verdict:
    """The reasons why a graph is wrong; empty where it seems correct."""

    checker: str
    numbers: str
    crash: str = ""
    """The exception that the checker raised instead of reporting a problem: a bug of its own."""
    values: str = ""
    """How the expressions of the outputs differ; not asked if the checker refuses the graph."""


def judge(gm: fx.GraphModule, original: Graph) -> Verdict:
    """Judge a mutant by the checker and by the numbers, to detect mutants without effect, too.

    The checker runs first, because it sets the types that the ranks' modules are emitted from.
    """
    rule = crash = ""
    try:
        rule = next((problem.rule for problem in checker.check_graph(gm)), "")
    except Exception as error:  # reported, and not counted as a refusal
        crash = f"{type(error).__name__}: {error}"
    values = "" if rule or crash else judge_values(gm, original)
    return Verdict(rule, judge_numbers(gm, original), crash, values)


def judge_values(gm: fx.GraphModule, original: Graph) -> str:
    """Describe how the expressions of a graph differ from the correct ones; "" if they do not."""
    expressions, expected = _expressions(original)
    try:
        return str(differs(expected, expressions.of(gm, REWRITES)) or "")
    except UnprovedError as error:
        return f"not proved: {error}"


@cache
def _expressions(original: Graph) -> tuple[Expressions, GraphValues]:
    """Return the expressions of the correct graph, with their table."""
    expressions = Expressions()
    return expressions, expressions.of(original.gm, REWRITES)


def judge_numbers(gm: fx.GraphModule, original: Graph) -> str:
    """Describe how the ranks' logits differ from the correct ones; return "" if they do not."""
    expected = _expected(original)
    try:
        rank_logits = _logits(gm, original)
    except Exception as error:  # an exception shows that the graph is wrong
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if any(logits.shape != expected.shape for logits in rank_logits):
        return "logits of another shape"
    if not all(torch.equal(logits, rank_logits[0]) for logits in rank_logits):
        return "ranks disagree"
    relative = float((rank_logits[0] - expected).abs().max() / expected.abs().max())
    return "" if relative <= TOLERANCE else f"off by {relative:.1e}"


@cache
def _expected(original: Graph) -> torch.Tensor:
    """Return the logits of the correct graph."""
    return _logits(original.gm, original)[0]


def _logits(gm: fx.GraphModule, original: Graph) -> list[torch.Tensor]:
    """Return each rank's logits by its emitted module, concatenated over all steps."""
    steps = steps_of(original)
    caches = caches_for(gm, steps, original)
    if decodes(original.gm):
        caches = [
            {n: tensor.clone() for n, tensor in inputs.items()} for inputs in _filled(original)
        ]
        return _run(gm, original, steps[1:], caches)
    return _run(gm, original, steps, caches)


@cache
def _filled(original: Graph) -> list[Inputs]:
    """Return the caches after all but the last token of each sequence."""
    first, _ = steps_of(original)
    caches = caches_for(original.prefill, [first], original)
    _run(original.prefill, original, [first], caches)
    return caches


def _run(
    gm: fx.GraphModule, original: Graph, steps: Sequence[Inputs], caches: Sequence[Inputs]
) -> list[torch.Tensor]:
    if any(node.target in DECODE_OPS for node in gm.graph.nodes):
        return _interpret(gm, original, steps, caches)
    subject, ranks = original.subject, info_of(gm).tp
    group = SimulatedGroup(ranks)
    modules = [
        load_rank(
            source,
            rank,
            {
                f"{node.target}{part.suffix}": evaluate(recipe, subject.read)
                for node in parameters(gm.graph)
                for part, recipe in parameter_of(node).components(rank)
            },
            subject.captured.rotary.fresh(),
            group.rank(rank),
        )
        for rank, source in enumerate(emit_sources(gm))
    ]
    step_logits = [
        run_simulated(modules, group, [{**step, **inputs} for inputs in caches]) for step in steps
    ]
    return [torch.cat(logits) for logits in zip(*step_logits, strict=True)]


def _interpret(
    gm: fx.GraphModule, original: Graph, steps: Sequence[Inputs], caches: Sequence[Inputs]
) -> list[torch.Tensor]:
    """Run a graph of instruction groups, which cannot be emitted as modules."""
    weights = materialise(gm, original.subject.read)
    gm = clone(gm)
    for node in kept_inputs(gm):
        node.op = "get_attr"  # each rank has its own cache, like its weights
        weights[str(node.target)] = [inputs[node.name] for inputs in caches]
    tables = original.subject.captured.rotary.fresh()
    with torch.inference_mode():
        step_logits = [logits_of(run_ranks(gm, step, weights, tables)) for step in steps]
    return [torch.cat(logits) for logits in zip(*step_logits, strict=True)]
