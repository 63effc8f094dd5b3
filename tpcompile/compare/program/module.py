"""The torch module on simulated ranks: the sharded graph before it is lowered to a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from tpcompile.compare.groups import Group, Key, Pieces, Side
from tpcompile.compare.program.layers import AttentionLayer, DeltaLayer
from tpcompile.compare.program.spans import AttentionInput, put_spans
from tpcompile.compare.program.structure import Structure
from tpcompile.compare.program.texts import Texts
from tpcompile.compare.routing import Experts, Replay
from tpcompile.compare.source import Source
from tpcompile.ir.info import info_of
from tpcompile.ir.kv import loaded_rows, nan_element
from tpcompile.ir.simulate import Values, materialise, run_ranks
from tpcompile.passes.cache_kv import CACHE
from tpcompile.passes.keep_states import STATES, TAILS
from tpcompile.rewriting.manager import clone
from tpcompile.runtime.ranks.rank import cache_shape, states_shapes

CPU = torch.device("cpu")


class Module:
    """A graph that stores K and V, its weights, and the cache and the states of each rank."""

    def __init__(self, gm: fx.GraphModule, structure: Structure, source: Source) -> None:
        self._structure, self._source = structure, source
        self._gm = clone(gm)
        self._nodes = {node.name: node for node in self._gm.graph.nodes}
        self.weights = materialise(self._gm, source.read)
        self.caches: list[torch.Tensor] = []
        self.states: list[dict[str, torch.Tensor]] = []

    def fill(self, texts: Texts, experts: Experts) -> None:
        """Run all tokens but the new ones. Fill unused slots and states with NaN.

        `experts` are those of each token that routers choose instead of their own.
        """
        for rank in range(info_of(self._gm).tp):
            shape = cache_shape(self._gm, rank)
            assert shape is not None
            cache = shape.allocate(texts.slots // shape.block, CPU)
            self.caches.append(cache.fill_(nan_element(cache)))
            states = {
                state.name: state.allocate(len(texts.tokens), CPU).fill_(torch.nan)
                for state in states_shapes(self._gm, rank)
            }
            self.states.append(states)
        self._hold(CACHE, self.caches)
        for name in self.states[0]:
            self._hold(name, [rank_states[name] for rank_states in self.states])
        before = texts.before()
        if len(before["input_ids"]):
            self._run(before, experts)

    def _hold(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Make an input a tensor that each rank holds, like a weight."""
        node = self._nodes[name]
        node.op = "get_attr"
        self.weights[str(node.target)] = [*tensors]

    def step(self, texts: Texts, groups: Sequence[Group], experts: Experts) -> Side:
        """Run the new tokens, and collect all values of all ranks.

        `experts` are those of each sequence that routers choose instead. The collected choices and
        scores are their own.
        """
        values, chosen = self._run(texts.new(), experts)
        pieces = Pieces("torch module", groups, info_of(self._gm).tp)
        for key, node in self._structure.named():
            whole = chosen.get(key) or values[self._nodes[node.name]]
            for rank, part in enumerate(whole):
                flat = part.flatten(1) if part.dim() > 1 else part[:, None]
                pieces.put(key, flat, f"%{node.name} rank {rank}", rank=rank)
        put_kept(pieces, self._structure, self.caches, self.states, texts)
        for layer in self._structure.attention:
            self._put_spans(pieces, layer, texts)
        return pieces.side()

    def _put_spans(self, pieces: Pieces, layer: AttentionLayer, texts: Texts) -> None:
        """Compute spans from the queries and the cache: the graph attends to all spans at once."""
        q, k, v = (
            pieces.whole((name, layer.number)).unfold(1, layer.width, layer.width)
            for name in ("q_rotated", "k_cached", "v_cached")
        )
        counts = list(texts.visible_counts(layer.window))
        keys, values = (torch.split(side, counts) for side in (k, v))
        visible = [
            AttentionInput(*tensors, layer.scale) for tensors in zip(q, keys, values, strict=True)
        ]
        spans, block = self._structure.spans, self._structure.block
        put_spans(pieces, layer.number, visible, texts.lengths, spans, block)

    def _run(
        self, inputs: dict[str, torch.Tensor], experts: Experts
    ) -> tuple[Values, dict[Key, list[torch.Tensor]]]:
        """Return all values, and the routers' own choices and scores, on each rank."""
        rotary = self._source.captured.rotary.fresh()
        replay = Replay(self._gm.graph, experts)
        with torch.inference_mode():
            values = run_ranks(self._gm, inputs, self.weights, rotary, replay.instead)
        chosen: dict[Key, list[torch.Tensor]] = {}
        for layer, ranks in replay.own_choices(values).items():
            chosen["choice", layer] = [choice.ids for choice in ranks]
            chosen["scores", layer] = [choice.scores for choice in ranks]
        return values, chosen


def put_kept(
    pieces: Pieces,
    structure: Structure,
    caches: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    texts: Texts,
) -> None:
    """Add the keys, values and states after the step, from the memory of each rank."""
    for attention in structure.attention:
        _put_cached(pieces, attention, caches, texts)
    for delta in structure.deltas:
        _put_states(pieces, delta, states, texts)


def _put_cached(
    pieces: Pieces, layer: AttentionLayer, caches: Sequence[torch.Tensor], texts: Texts
) -> None:
    """Add the cached keys and values of the tokens that are visible to the layer."""
    runs = zip(texts.visible_counts(layer.window), texts.lengths, strict=True)
    places = [
        texts.places(row, length - visible, length) for row, (visible, length) in enumerate(runs)
    ]
    for rank, cache in enumerate(caches):
        for side, name in enumerate(("k_cached", "v_cached")):
            rows = loaded_rows(cache[layer.place, side, torch.cat(places)]).flatten(1)
            pieces.put((name, layer.number), rows, f"the cache of rank {rank}", rank=rank)


def _put_states(
    pieces: Pieces,
    layer: DeltaLayer,
    states: Sequence[Mapping[str, torch.Tensor]],
    texts: Texts,
) -> None:
    """Add the last inputs of the convolution and the matrices of heads."""
    for rank, rank_states in enumerate(states):
        tails, matrices = (rank_states[name][layer.place, texts.states] for name in (TAILS, STATES))
        source = f"the states of rank {rank}"
        pieces.put(("tail", layer.number), tails.flatten(0, 1), source, rank=rank)
        pieces.put(("state", layer.number), matrices.flatten(1), source, rank=rank)
