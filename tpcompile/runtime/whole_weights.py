"""The checkpoint's tensors put together again from the ranks' shards, one at a time."""

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
    """A model's tensors by the names that Hugging Face gives them. All are on the ranks."""

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
        """Each tensor without its numbers; tied ones under their first name only."""
        return {
            name: torch.empty(self._shapes[name], dtype=value_type(nodes[0]).dtype, device="meta")
            for name, nodes in self._nodes.items()
        }

    def first_name(self, name: str) -> str:
        """The name that a tensor goes by, if it is tied and has several."""
        known = self.aliases.get(name, name)
        if known not in self._nodes:
            raise UsageError(
                f"The model has no tensor {name!r}", hint=did_you_mean(name, self._nodes)
            )
        return known

    def gather(self, name: str, ranks: Ranks) -> torch.Tensor:
        """A tensor in memory of its own. A shard is fetched when its turn comes, and let go."""
        known = self.first_name(name)
        return unshard(known, self._shapes[known], self._shards(known, ranks))

    def _shards(self, name: str, ranks: Ranks) -> Iterator[tuple[Recipe, torch.Tensor]]:
        for node in self._nodes[name]:
            for rank, recipe in enumerate(parameter_of(node).shards):
                if any(piece.tensor == name for piece in pieces(recipe)):
                    yield recipe, ranks.parameter(rank, str(node.target))

    def state_dict(self, ranks: Ranks) -> OrderedDict[str, torch.Tensor]:
        """All tensors, on the CPU; tied ones are one tensor under each of their names."""
        found = OrderedDict((name, self.gather(name, ranks).cpu()) for name in self._nodes)
        found.update((alias, found[name]) for alias, name in self.aliases.items())
        return found


def embeddings_of(captured: fx.GraphModule) -> frozenset[str]:
    """The tensors that a captured graph looks tokens up in."""
    return frozenset(
        tensor.name
        for node in parameters(captured.graph)
        if any(user.target in (EMBEDDING, VOCAB_EMBEDDING) for user in node.users)
        for tensor in tensors_of(parameter_of(node).whole)
    )
