"""A rank: its description, which can be sent, and its module with the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from tpcompile.backends.executor import TORCH, Executor, OnTokens
from tpcompile.backends.share import RankShare
from tpcompile.backends.torch_tp import Storage, emit_sources, load_rank, plain, storages_of
from tpcompile.comm import Group
from tpcompile.huge_pages import allocated
from tpcompile.ir.info import info_of
from tpcompile.ir.kv import row_in_memory
from tpcompile.ir.meta import OUTPUTS, parameter_of, parameters, value_type
from tpcompile.ir.ops import ROTARY
from tpcompile.ir.recipe import Recipe
from tpcompile.ir.roles import StatesOf
from tpcompile.passes.cache_kv import CACHE, block_size
from tpcompile.pause import paused_collector
from tpcompile.runtime.ranks.executors import StepExecutors
from tpcompile.runtime.ranks.routing import RouterShape, routers_of, run_routed
from tpcompile.runtime.ranks.step import ProgramSize, Step, StepCode


class LocalParameter(NamedTuple):
    """The recipe, dtype and storage of a parameter on a rank."""

    recipe: Recipe
    dtype: torch.dtype
    storage: Storage


@dataclass(frozen=True)
class RankModule:
    """The description of a rank, without weights and graph, so that it can be sent."""

    rank: int
    source: str
    parameters: Mapping[str, LocalParameter]
    """The parameters by their names in the graph."""
    outputs: tuple[str, ...]
    cache: CacheShape | None
    rotary: tuple[tuple[int, torch.dtype], ...]
    """The rotary tables that the module uses: width and dtype."""
    states: tuple[StatesShape, ...] = ()
    routers: tuple[RouterShape, ...] = ()


@dataclass(frozen=True)
class CacheShape:
    """The KV cache of a rank: `[layers, 2, slots, heads, row]`; a block is a run of slots.

    In memory the slots of a head are contiguous, in the order in which attention reads them.
    """

    layers: int
    heads: int
    row: int
    """The elements of a row in memory: see `tpcompile/ir/kv.py`."""
    dtype: torch.dtype
    block: int

    def allocate(self, blocks: int, device: torch.device) -> torch.Tensor:
        """Allocate a cache of `blocks` blocks."""
        shape = (self.layers, 2, self.heads, blocks * self.block, self.row)
        return allocated(shape, self.dtype, device).transpose(2, 3)


@dataclass(frozen=True)
class StatesShape:
    """States of linear attention of a rank, `[layers, states, *shape]`."""

    name: str
    """The name of the graph's input."""
    layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def allocate(self, count: int, device: torch.device) -> torch.Tensor:
        """Allocate a number of states of each layer."""
        return allocated((self.layers, count, *self.shape), self.dtype, device)


@paused_collector()
def rank_modules(graph: fx.GraphModule, executor: type[Executor] | None = None) -> list[RankModule]:
    """Return the description of each rank of a sharded graph.

    With an `executor`, all parameters are stored row by row, so that its programs can share them.
    """
    storages = storages_of(graph.graph, programs=executor is not None)
    functions = TORCH if executor is None else executor.functions
    nodes = list(parameters(graph.graph))
    rotary = [node.args[1:3] for node in graph.graph.nodes if node.target == ROTARY]
    return [
        RankModule(
            rank,
            source,
            {
                f"{node.target}{part.suffix}": LocalParameter(
                    recipe, part.dtype.torch, storages[str(node.target)]
                )
                for node in nodes
                for part, recipe in parameter_of(node).components(rank)
            },
            OUTPUTS[: len(info_of(graph).outputs)],
            cache_shape(graph, rank),
            tuple(dict.fromkeys(rotary)),
            tuple(states_shapes(graph, rank)),
            tuple(routers_of(graph.graph)),
        )
        for rank, source in enumerate(emit_sources(graph, storages, functions))
    ]


def cache_shape(graph: fx.GraphModule, rank: int) -> CacheShape | None:
    """Return the KV cache of a rank, or None if the graph has no cache."""
    cache = next((n for n in graph.graph.nodes if n.op == "placeholder" and n.name == CACHE), None)
    if cache is None:
        return None
    kind = value_type(cache)
    layers, _, _, heads, width = kind.local_shape(rank)
    row, dtype = row_in_memory(int(width), kind.dtype, kind.format)
    return CacheShape(int(layers), int(heads), row, dtype, block_size(graph))


def states_shapes(graph: fx.GraphModule, rank: int) -> Iterator[StatesShape]:
    """Yield the states of linear attention of a rank."""
    for node in graph.graph.nodes:
        if node.op == "placeholder" and value_type(node).role == StatesOf():
            kind = value_type(node)
            layers, _, *shape = kind.local_shape(rank)
            yield StatesShape(node.name, int(layers), tuple(map(int, shape)), kind.dtype)


_READ_BY_HOST = ("starts", "tables", "lengths", "read", "write")
"""Inputs that the host reads for addresses: on a GPU, each layer would copy them back."""


class Rank:
    """The module of a rank and its KV cache."""

    def __init__(
        self,
        module: RankModule,
        weights: Mapping[str, torch.Tensor],
        rotary: nn.Module,
        group: Group,
        device: torch.device,
    ) -> None:
        self.module = module
        self._loaded = load_rank(module.source, module.rank, weights, rotary, group)
        self._weights = weights
        self._device = device
        self._cache = module.cache.allocate(0, device) if module.cache else None
        self._states = {state.name: state.allocate(0, device) for state in module.states}
        self._executors = StepExecutors()

    def run(self, step: Step) -> torch.Tensor:
        """Run the module on a step; K and V of the step's tokens are stored in the cache."""
        inputs: dict[str, Any] = {
            name: value if name in _READ_BY_HOST else value.to(self._device)
            for name, value in step.inputs.items()
        }
        if self._cache is not None:
            inputs[CACHE] = self.cache_for(step)
            inputs |= self._states
        if len(self.module.outputs) > 1:
            inputs["output"] = step.output
        with torch.inference_mode():
            if step.routing is not None:
                return run_routed(self._loaded, inputs, step.routing)
            output: torch.Tensor = self._loaded(**inputs)
        return output

    def load_program(self, code: StepCode, share: RankShare) -> None:
        """Load a program, of which this rank runs its own instructions."""
        self._executors.load(
            code, lambda rank, name: self.parameter(name), [self.cache], [self.states], share
        )

    def run_program(
        self, size: ProgramSize, step: Step, on_tokens: OnTokens | None = None
    ) -> torch.Tensor:
        """Run steps by the program of this size; return the tokens or own logits."""
        cache = self.cache_for(step)
        return self._executors.run(size, step, [cache], [self.states], on_tokens)

    def times(self, size: ProgramSize) -> torch.Tensor:
        """Return the times of the last timed step: see `StepExecutors.times`."""
        return self._executors.times(size)

    @property
    def cache(self) -> torch.Tensor:
        """The KV cache at its current size."""
        assert self._cache is not None
        return self._cache

    @property
    def states(self) -> dict[str, torch.Tensor]:
        """The states of linear attention by name, at their current number."""
        return self._states

    def cache_for(self, step: Step) -> torch.Tensor:
        """Return the KV cache, grown and with blocks copied as a step requires."""
        self._make_room(step.blocks)
        self._make_room_for_states(step.states)
        self._copy(step.copies)
        return self.cache

    def _make_room(self, blocks: int) -> None:
        assert self.module.cache is not None and self._cache is not None
        slots = blocks * self.module.cache.block
        if slots <= self._cache.shape[2]:
            return
        grown = self.module.cache.allocate(blocks, self._device)
        grown[:, :, : self._cache.shape[2]] = self._cache
        self._cache = grown

    def _make_room_for_states(self, count: int) -> None:
        for state in self.module.states:
            old = self._states[state.name]
            if count > old.shape[1]:
                self._states[state.name] = grown = state.allocate(count, self._device)
                grown[:, : old.shape[1]] = old

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        assert self.module.cache is not None and self._cache is not None
        block = self.module.cache.block
        blocks = self._cache.unfold(2, block, block)
        source, target = zip(*copies, strict=True)
        blocks[:, :, list(target)] = blocks[:, :, list(source)]

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter row by row."""
        return plain(self._weights[name])
