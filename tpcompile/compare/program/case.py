"""The steps of eager and the torch module, run once and compared with any number of programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tpcompile.backends.executor import Executor
from tpcompile.backends.reference import Machine
from tpcompile.backends.reference.orders import Order, in_program_order
from tpcompile.compare.choices import Choices
from tpcompile.compare.comparison import Comparison, same_tokens
from tpcompile.compare.group_rows import (
    CHOICE,
    LOGITS,
    TOKEN,
    GroupRow,
    Step,
    compare_sides,
    side_choices,
)
from tpcompile.compare.groups import Side
from tpcompile.compare.program.eager import Eager
from tpcompile.compare.program.module import Module
from tpcompile.compare.program.program import LaunchedSide, ProgramSide, Start
from tpcompile.compare.program.structure import Structure, structure_of
from tpcompile.compare.program.texts import Texts, random_texts
from tpcompile.compare.proofs import Proofs
from tpcompile.compare.routing import Experts
from tpcompile.compare.rows import token_margin
from tpcompile.compare.source import Source, eager_model, in_fp32
from tpcompile.errors import UsageError
from tpcompile.frontend import capture
from tpcompile.ir.meta import parameters
from tpcompile.ir.ops import PARTIAL_ATTENTION, arguments_of
from tpcompile.ir.scheme import Scheme
from tpcompile.ir.simulate import components, materialise
from tpcompile.passes import Pass, Stage, run_passes
from tpcompile.passes.cache_kv import CacheKv, stored_format
from tpcompile.passes.keep_states import KeepStates
from tpcompile.rewriting.reproducer import write_reproducer
from tpcompile.runtime.weights import opened, weights_of
from tpcompile.vm.program import Program


@dataclass(frozen=True)
class Batch:
    """The lengths of random sequences, including the first new token, and the number of steps."""

    lengths: tuple[int, ...] = (9, 17, 1)
    steps: int = 1
    seed: int = 0


@dataclass(frozen=True)
class CaseStep:
    """A decode step of eager and the torch module, the sides without a program."""

    texts: Texts
    step: Step
    module: Side

    @property
    def experts(self) -> dict[int, torch.Tensor]:
        """The experts that eager has chosen for each sequence, by layer."""
        return experts_of(self.step.eager)


@dataclass(frozen=True)
class Case:
    """A decode graph with its weights, and the steps of eager and the torch module."""

    graph: fx.GraphModule
    structure: Structure
    weights: dict[str, list[torch.Tensor]]
    """The parameters of the ranks, as programs hold them."""
    rotary: Callable[..., Any]
    caches: tuple[torch.Tensor, ...]
    """The cache of each rank before the first step."""
    states: tuple[dict[str, torch.Tensor], ...]
    """The states of linear attention of each rank before the first step, by name."""
    steps: tuple[CaseStep, ...]
    tolerance: float | None
    proofs: Proofs = field(default_factory=Proofs)

    @property
    def longest(self) -> int:
        """The maximum number of tokens of each sequence."""
        texts = self.steps[0].texts
        return texts.tables.shape[1] * texts.block

    def against(
        self,
        program: Program,
        order: Order = in_program_order,
        backend: type[Executor] = Machine,
    ) -> Comparison:
        """Compare the program with the other sides. All sides get the tokens that eager chose.

        The program runs on the reference machine, and on `backend` if that is another one.
        """
        prefilled = self.caches, self.states
        start = Start(program, self.structure, self._parameter, self.rotary, *prefilled)
        rows: list[GroupRow] = []
        choices: list[Choices] = []
        equal = True
        with ExitStack() as stack:
            runs = [stack.enter_context(closing(ProgramSide(start, Machine, order)))]
            if backend is not Machine:
                runs.append(stack.enter_context(closing(LaunchedSide(start, backend, order))))
            for number, case_step in enumerate(self.steps, 1):
                experts = case_step.experts
                program_sides = (
                    run.step(case_step.texts, case_step.step.groups, experts) for run in runs
                )
                sides = (case_step.module, *program_sides)
                step_choices = [
                    choice
                    for side in sides
                    for choice in side_choices(case_step.step, side, self.tolerance, number)
                ]
                rows += compare_sides(case_step.step, sides, self.tolerance, number, step_choices)
                choices += step_choices
                equal = equal and all(self._same_tokens(case_step.step, side) for side in sides)
        top5 = _likeliest(case_step.step.eager, *sides)
        shown = (LOGITS[0], TOKEN[0])
        proofs = self.proofs
        return Comparison(tuple(rows), equal, top5, shown, choices=tuple(choices), proofs=proofs)

    def _parameter(self, rank: int, name: str) -> torch.Tensor:
        return self.weights[name][rank].contiguous()

    def _same_tokens(self, step: Step, side: Side) -> bool:
        eager, chosen = step.eager.values[LOGITS], side.values[TOKEN].long()
        if int(chosen.min()) < 0 or int(chosen.max()) >= eager.shape[1]:
            return False
        exact = step.exact.values[LOGITS] if step.exact else None
        margin = token_margin(eager, exact, self.tolerance)
        return same_tokens(eager, chosen, margin)


def prepare(
    model: Any,
    passes: Sequence[Pass],
    batch: Batch,
    *,
    dtype: torch.dtype | None = None,
    scheme: Scheme | None = None,
    rounds: bool = False,
    random_weights: int | None = None,
    adapter: str | Path | None = None,
    tolerance: float | None = None,
) -> Case:
    """Capture the model, run the passes, prefill the caches, and decode on eager and the module."""
    captured = capture(model, dtype=dtype, scheme=scheme, rounds=rounds)
    _check_room(batch, captured.config.max_position_embeddings)
    weights = weights_of(captured, model, random_weights, adapter)
    graph, stages = run_passes(captured.graph, passes, on_failure=write_reproducer)
    sharded = _before_fusion(stages)
    structure = structure_of(sharded, _spans(graph))
    with opened(weights) as read:
        source = Source(captured, read, stored_format(graph), adapter is not None)
        exact = in_fp32(source) if tolerance is None else None
        vocabulary = captured.config.vocab_size
        texts = random_texts(batch.lengths, batch.steps, vocabulary, structure.block, batch.seed)
        sources = [origin for origin in (source, exact) if origin]
        eagers = [Eager(eager_model(origin), structure, origin.kv) for origin in sources]
        module = Module(sharded, structure, source)
        eager, *references = eagers
        before = eager.fill(texts)
        for reference in references:
            reference.fill(texts, before)
        module.fill(texts, _in_a_row(before))
        caches = tuple(cache.clone() for cache in module.caches)
        states = tuple(
            {name: state.clone() for name, state in rank_states.items()}
            for rank_states in module.states
        )
        steps = tuple(_steps(texts, structure, eagers, module, batch.steps))
        names = {str(node.target) for node in parameters(graph.graph)}
        alike = names <= module.weights.keys()  # the later fusions leave weights unchanged
        weights_of_module = module.weights if alike else materialise(graph, read)
        held: dict[str, list[Any]] = {**weights_of_module, **components(graph, read)}
    rotary = captured.rotary.fresh()
    proofs = Proofs.of(passes, stages)
    return Case(graph, structure, held, rotary, caches, states, steps, tolerance, proofs)


def _check_room(batch: Batch, most: int) -> None:
    """Refuse a batch with more tokens per sequence than the model has positions."""
    last = max(batch.lengths, default=0) + batch.steps - 1
    if last > most:
        raise UsageError(
            f"The longest sequence has {last:,} tokens, including those of all steps",
            expected=f"at most {most:,}, the max_position_embeddings of the configuration",
            hint="Compare shorter sequences, or fewer steps",
        )


def _steps(
    texts: Texts, structure: Structure, eagers: Sequence[Eager], module: Module, steps: int
) -> Iterator[CaseStep]:
    for _ in range(steps):
        groups = structure.groups(texts)
        eager, *references = eagers
        eager_side = eager.step(texts, groups)
        experts = experts_of(eager_side)
        exact = references[0].step(texts, groups, experts) if references else None
        tokens = tuple(length - 1 for length in texts.lengths)
        step = Step(groups, eager_side, exact, structure.normalized, tokens)
        yield CaseStep(texts, step, module.step(texts, groups, experts))
        texts = texts.going_on(step.eager.values[TOKEN])


def experts_of(eager: Side) -> dict[int, torch.Tensor]:
    """Return the experts that eager has chosen for each sequence, by layer."""
    entries = eager.values.items()
    return {layer: ids for (name, layer), ids in entries if name == CHOICE and layer is not None}


def _in_a_row(sequences: Sequence[Experts]) -> dict[int, torch.Tensor]:
    """Return the choices of several sequences, one after another."""
    layers = {layer for choices in sequences for layer in choices}
    return {
        layer: torch.cat([choices[layer] for choices in sequences if choices]) for layer in layers
    }


def _before_fusion(stages: Sequence[Stage]) -> fx.GraphModule:
    """Return the torch module's graph, which keeps K, V and states, and has no fused values yet."""
    candidates = [stage for stage in stages if stage.name in (CacheKv.name, KeepStates.name)]
    if not candidates:
        raise UsageError(
            "The pipeline does not produce a program",
            got="no cache-kv pass",
            expected="the decode pipeline",
            hint='Leave out -p, or write -p "decode{spans=2}"',
        )
    return candidates[-1].graph


def _spans(graph: fx.GraphModule) -> int:
    """Return the number of spans that attention is split into."""
    node = next((n for n in graph.graph.nodes if n.target is PARTIAL_ATTENTION), None)
    if node is None:
        raise UsageError(
            "The pipeline does not produce a program",
            got="attention that is not split into spans",
            expected="the decode pipeline",
            hint='Leave out -p, or write -p "decode{spans=2}"',
        )
    return int(arguments_of(node)["spans"])


def _likeliest(*sides: Side) -> dict[str, list[int]]:
    """Return the five likeliest tokens of the last sequence, by side."""
    return {
        side.name: logits[-1].topk(min(5, logits.shape[1])).indices.tolist()
        for side in sides
        for logits in [side.values[LOGITS]]
    }
