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
from tpcompile.ir.recipe import Recipe, Tensor, component_of, stored_tensors, tensors_of
from tpcompile.runtime.ranks.rank import Ranks


class WholeWeights:
    """A checkpoint's tensors by their names in it. Their data is on the ranks."""

    def __init__(self, graph: fx.GraphModule, order: Mapping[str, Tensor], aliases: dict[str, str]):
        self._stored = {own.name: (own, part) for own, part in stored_tensors(order.values())}
        self._nodes: dict[str, list[fx.Node]] = {name: [] for name in self._stored}
        for node in parameters(graph.graph):
            for own, _ in stored_tensors(dict.fromkeys(tensors_of(parameter_of(node).whole))):
                self._nodes[own.name].append(node)
        self.aliases = aliases
        """The other names of tied tensors."""

    def metas(self) -> dict[str, torch.Tensor]:
        """Return a meta tensor for each tensor; tied ones appear only under their first name."""
        return {
            name: torch.empty(
                tensor.shape,
                dtype=part.dtype.torch if part else value_type(self._nodes[name][0]).dtype,
                device="meta",
            )
            for name, (tensor, part) in self._stored.items()
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
        return unshard(known, self._stored[known][0].shape, self._shards(known, ranks))

    def _shards(self, name: str, ranks: Ranks) -> Iterator[tuple[Recipe, torch.Tensor]]:
        _, part = self._stored[name]
        for node in self._nodes[name]:
            for rank, whole in enumerate(parameter_of(node).shards):
                recipe = component_of(whole, part) if part else whole
                if any(piece.tensor == name for piece in pieces(recipe)):
                    suffix = part.suffix if part else ""
                    yield recipe, ranks.parameter(rank, f"{node.target}{suffix}")

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
