"""Decode steps of a small real model on the reference machine, with a prefilled cache.

The torch backend's graph fills the cache, in scattered blocks. The remaining tokens are then given
one by one, so that a single forward pass of Hugging Face gives the expected logits of all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from tests.backends.reference.step_models import decode_passes, pair_named
from tests.models import Pair, padded
from tests.stages import stages_of
from tpcompile.backends.executor import Executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference import Machine
from tpcompile.backends.reference.orders import Order, in_program_order
from tpcompile.backends.rotation import CPU, Rotation, rotation_of
from tpcompile.compare.rounded_cache import RoundedCache
from tpcompile.ir.info import info_of
from tpcompile.ir.kv import nan_element
from tpcompile.ir.simulate import components, materialise, run_ranks
from tpcompile.passes.cache_kv import CACHE, CacheKv, kv_format
from tpcompile.rewriting.manager import clone
from tpcompile.runtime.cache_name import CACHE as CACHE_NAME
from tpcompile.runtime.ranks.rank import cache_shape, states_shapes
from tpcompile.vm.lowering import StepPlan
from tpcompile.vm.program import Program
from tpcompile.vm.schedule.policies import POLICIES
from tpcompile.vm.schedule.scheduled import scheduled
from tpcompile.vm.targets import target_of

BLOCK = 4
STEPS = 32
EDGES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 2)
"""Lengths including the first new token: around block boundaries, and several blocks long."""
LONGEST = 64
"""The maximum number of tokens per sequence."""


@dataclass(frozen=True)
class Case:
    """The model, its lowering and its schedule."""

    model: str
    tp: int = 1
    lengths: tuple[int, ...] = EDGES
    spans: int = 2
    lowering: str = "heads"
    interleaved: bool = False
    policy: str = "critical-path"
    workers: int = 3
    blocks_per_worker: int = 1
    column_splits: int = 1
    kv: str = CacheKv.kv
    rows: tuple[int, ...] = ()
    """The rows of each sequence in a step; empty for one each."""

    @property
    def pair(self) -> Pair:
        return pair_named(self.model)

    @property
    def graph(self) -> fx.GraphModule:
        return _graphs(self.model, self.tp, self.spans, self.interleaved, self.kv)[1]

    @property
    def plan(self) -> StepPlan:
        return StepPlan(
            self.workers,
            batch=sum(self.rows) or len(self.lengths),
            sequence_rows=sum(self.rows) or 1,
            max_seq_len=LONGEST,
            context=LONGEST,
            lowering=self.lowering,
            column_splits=self.column_splits,
            grain=4,
            blocks_per_worker=self.blocks_per_worker,
            steps=STEPS,
        )

    @property
    def program(self) -> Program:
        return _program(self)

    def machine(self) -> Machine:
        """Return a reference machine whose cache holds all tokens before the first step."""
        return Machine(self.memory())

    def memory(
        self, poison: bool = True, device: torch.device = CPU, apart: bool = False
    ) -> StepMemory:
        """Return such a memory for any executor, on any device."""
        weights = _weights(self.model, self.tp, self.interleaved)
        prefilled = _prefilled(self.model, self.tp, self.lengths, self.interleaved, self.kv)
        caches, *states = [
            [tensor.clone().to(device) for tensor in prefilled[name]] for name in prefilled
        ]
        states = [[_with_more(state, sum(self.rows)) for state in per_rank] for per_rank in states]
        return StepMemory(
            self.program,
            lambda rank, name: weights[name][rank].to(device),
            self.rotation,
            caches,
            [
                dict(zip(list(prefilled)[1:], rank_states, strict=True))
                for rank_states in zip(*states, strict=True)
            ],
            poison=poison,
            device=device,
            apart=apart,
        )

    @property
    def rotation(self) -> Rotation:
        """Return cosines and sines of all positions that the program supports."""
        return rotation_of(self.program, self.pair.captured.rotary.fresh())


def schedules(workers: Sequence[int]) -> Iterator[tuple[str, int, str]]:
    """Yield policies, numbers of workers and lowerings: all pairs of values, not all triples.

    A lowering makes the instructions, a policy orders them by their costs, and queues get them in
    that order, so each depends on the one before it only.
    """
    for number, policy in enumerate(POLICIES):
        for place, count in enumerate(workers):
            yield policy, count, ("heads", "rows")[(number + place) % 2]


@lru_cache(maxsize=64)
def _program(case: Case) -> Program:
    schedule = scheduled(case.graph, target_of("cpu", case.workers), case.plan, case.policy)
    assert not schedule.faults, schedule.faults[0]
    return schedule.program


@lru_cache(maxsize=64)
def _graphs(
    model: str, tp: int, spans: int, interleaved: bool, kv: str = CacheKv.kv
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graph that can prefill, and the decode graph lowered from it."""
    passes = decode_passes(model, tp, spans, BLOCK, interleaved, kv)
    stages = stages_of(pair_named(model), passes)
    return next(s.graph for s in stages if s.name == "keep-states"), stages[-1].graph


def _with_more(states: torch.Tensor, count: int) -> torch.Tensor:
    """Return states with so many more, which are NaN."""
    shape = (states.shape[0], count, *states.shape[2:])
    return torch.cat([states, torch.full(shape, torch.nan, dtype=states.dtype)], 1).to(states)


@lru_cache(maxsize=8)
def _weights(model: str, tp: int, interleaved: bool) -> dict[str, list[torch.Tensor]]:
    graph, read = _graphs(model, tp, 1, interleaved)[1], pair_named(model).read
    return materialise(graph, read) | components(graph, read)


def texts(model: str, lengths: Sequence[int], steps: int = STEPS) -> list[torch.Tensor]:
    """Return the tokens of each sequence, including those of all steps."""
    vocabulary = pair_named(model).captured.config.vocab_size
    longer = [length + steps - 1 for length in lengths]
    ids, mask = padded(longer, vocabulary)
    return [row[present.bool()] for row, present in zip(ids, mask, strict=True)]


def tables_of(lengths: Sequence[int], steps: int = STEPS) -> torch.Tensor:
    """Return block tables with room for all steps; blocks are assigned round-robin, in reverse."""
    held = [-(-(length + steps) // BLOCK) for length in lengths]
    tables = torch.full((len(lengths), max(held)), -1)
    block = 0
    for place in range(max(held)):
        for row, count in enumerate(held):
            if place < count:
                tables[row, place] = block
                block += 1
    return tables.where(tables < 0, block - 1 - tables)


@lru_cache(maxsize=16)
def _prefilled(
    model: str, tp: int, lengths: tuple[int, ...], interleaved: bool, kv: str
) -> dict[str, list[torch.Tensor]]:
    """Return each rank's cache, and its states if the model has any, by the names of inputs.

    They hold all tokens but the last; all other slots, and as many states again, are NaN.
    """
    pair = pair_named(model)
    gm = clone(_graphs(model, tp, 1, interleaved, kv)[0])
    blocks = int(tables_of(lengths).max()) + 1
    tensors: dict[str, list[torch.Tensor]] = {CACHE: []}
    for rank in range(info_of(gm).tp):
        shape = cache_shape(gm, rank)
        assert shape is not None and shape.block == BLOCK
        tensors[CACHE].append(shape.allocate(blocks, CPU))
        for state in states_shapes(gm, rank):
            tensors.setdefault(state.name, []).append(state.allocate(2 * len(lengths), CPU))
    for tensor in (tensor for per_rank in tensors.values() for tensor in per_rank):
        tensor.fill_(nan_element(tensor))
    inputs = _prompt(model, lengths)
    if len(inputs["input_ids"]):
        weights = materialise(gm, pair.read) | tensors
        for node in gm.graph.nodes:
            if node.name in tensors:
                node.op = "get_attr"  # they are given per rank, like weights
        with torch.inference_mode():
            run_ranks(gm, inputs, weights, pair.captured.rotary.fresh())
    return tensors


def _prompt(model: str, lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    rows = [row[: length - 1] for row, length in zip(texts(model, lengths), lengths, strict=True)]
    counts = torch.tensor([len(row) for row in rows])
    places = [torch.arange(len(row)) for row in rows]
    slots = [
        table[place // BLOCK] * BLOCK + place % BLOCK
        for table, place in zip(tables_of(lengths), places, strict=True)
    ]
    return {
        "input_ids": torch.cat(rows),
        "positions": torch.cat(places),
        "starts": torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]),
        "logit_rows": torch.arange(int(counts.sum())),
        "slots": torch.cat(slots),
        "tables": tables_of(lengths),
        "lengths": counts,
        "read": torch.arange(len(rows)),
        "write": torch.arange(len(rows)),
    }


@lru_cache(maxsize=16)
def eager_logits(model: str, lengths: tuple[int, ...], kv: str = CacheKv.kv) -> list[torch.Tensor]:
    """Return Hugging Face's logits of all tokens of each sequence."""
    eager, stored = pair_named(model).eager, kv_format(kv)
    past = [
        {} if stored is None else {CACHE_NAME: RoundedCache(stored, eager.config)} for _ in lengths
    ]
    with torch.inference_mode():
        return [
            eager(row[None], **options).logits[0]
            for row, options in zip(texts(model, lengths), past, strict=True)
        ]


def steps_of(
    case: Case,
    steps: int = STEPS,
    order: Callable[[int], Order] = lambda step: in_program_order,
) -> list[torch.Tensor]:
    """Return the logits of each step on the reference machine, `[batch, vocabulary]`."""
    return steps_on(case.machine(), case, steps, lambda step: (order(step),))


def steps_on(
    executor: Executor,
    case: Case,
    steps: int = STEPS,
    options: Callable[[int], tuple[Any, ...]] = lambda step: (),
) -> list[torch.Tensor]:
    """Return the logits of each step on any executor."""
    logits = []
    for step in range(steps):
        place(executor, case, step)
        executor.run(1, *options(step))
        logits.append(executor.logits.clone())
    return logits


def place(executor: Any, case: Case, step: int = 0, **options: Any) -> None:
    """Place the tokens of a step."""
    rows, lengths = texts(case.model, case.lengths), torch.tensor(case.lengths) + step
    tokens = [row[length - 1] for row, length in zip(rows, lengths.tolist(), strict=True)]
    executor.place(torch.stack(tokens), lengths, tables_of(case.lengths), **options)


def worst_error(case: Case, steps: Sequence[torch.Tensor]) -> float:
    """Return the largest error of any step, relative to the largest logit of that step."""
    eager = eager_logits(case.model, case.lengths, case.kv)
    worst = 0.0
    for step, logits in enumerate(steps):
        places = [length - 1 + step for length in case.lengths]
        wanted = torch.stack([row[position] for row, position in zip(eager, places, strict=True)])
        error = float((logits - wanted).abs().max() / wanted.abs().max())
        assert error == error, f"step {step} has NaN logits"
        worst = max(worst, error)
    return worst
