"""The checkpoint's tensors, assembled from the ranks' shards one at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from tpcompile.errors import UsageError, did_you_mean
from tpcompile.ir.meta import parameter_of, parameters, value_type
from tpcompile.ir.ops import EMBEDDING, VOCAB_EMBEDDING
from tpcompile.ir.pieces import pieces, unshard
from tpcompile.ir.recipe import Recipe, tensors_of
from tpcompile.runtime.ranks.rank import Ranks


class WholeWeights:
    """A model's tensors by their names in Hugging Face. Their data is on the ranks."""

    def __init__(self, graph: fx.GraphModule, order: Mapping[str, object], aliases: dict[str, str]):
        self._nodes: dict[str, list[fx.Node]] = {name: [] for name in order}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for node in parameters(graph.graph):
            for tensor in tensors_of(parameter_of(node).whole):
                self._shapes[tensor.name] = tensor.shape
                if node not in self._nodes[tensor.name]:
                    self._nodes[tensor.name].append(node)
        self.aliases = aliases
        """The other names of tied tensors."""

    def metas(self) -> dict[str, torch.Tensor]:
        """Return a meta tensor for each tensor; tied ones appear only under their first name."""
        return {
            name: torch.empty(self._shapes[name], dtype=value_type(nodes[0]).dtype, device="meta")
            for name, nodes in self._nodes.items()
        }

    def first_name(self, name: str) -> str:
        """Return the first name of a tied tensor, and the name of any other tensor unchanged."""
        known = self.aliases.get(name, name)
        if known not in self._nodes:
            raise UsageError(
                f"The model has no tensor {name!r}", hint=did_you_mean(name, self._nodes)
            )
        return known

    def gather(self, name: str, ranks: Ranks) -> torch.Tensor:
        """Return a tensor in new memory. Shards are fetched and freed one at a time."""
        known = self.first_name(name)
        return unshard(known, self._shapes[known], self._shards(known, ranks))

    def _shards(self, name: str, ranks: Ranks) -> Iterator[tuple[Recipe, torch.Tensor]]:
        for node in self._nodes[name]:
            for rank, recipe in enumerate(parameter_of(node).shards):
                if any(piece.tensor == name for piece in pieces(recipe)):
                    yield recipe, ranks.parameter(rank, str(node.target))

    def state_dict(self, ranks: Ranks) -> OrderedDict[str, torch.Tensor]:
        """Return all tensors on the CPU; tied ones are one tensor under each of their names."""
        found = OrderedDict((name, self.gather(name, ranks).cpu()) for name in self._nodes)
        found.update((alias, found[name]) for alias, name in self.aliases.items())
        return found


def embeddings_of(captured: fx.GraphModule) -> frozenset[str]:
    """Return the names of the embedding tensors of a captured graph."""
    return frozenset(
        tensor.name
        for node in parameters(captured.graph)
        if any(user.target in (EMBEDDING, VOCAB_EMBEDDING) for user in node.users)
        for tensor in tensors_of(parameter_of(node).whole)
    )
