"""The checkpoint's tensors, assembled from the ranks' shards one at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx

from tpcompile.errors import UsageError, did_you_mean
from tpcompile.ir.codec import Codec, Encodings
from tpcompile.ir.format import Component
from tpcompile.ir.meta import parameter_of, parameters, value_type
from tpcompile.ir.ops import EMBEDDINGS
from tpcompile.ir.pieces import pieces, unshard
from tpcompile.ir.recipe import Recipe, Tensor, component_of, stored_tensors, tensors_of


class LocalParameters(Protocol):
    """The parameters of ranks."""

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        """Return a rank's local parameter."""
        ...


@dataclass(frozen=True)
class _Whole:
    """A tensor of the model, and how the checkpoint stores it."""

    tensor: Tensor
    part: Component | None
    codec: Codec | None
    nodes: Sequence[fx.Node]
    """The parameters that have elements of it."""

    def meta(self) -> torch.Tensor:
        """Return a meta tensor of the shape and dtype in the checkpoint."""
        shape, dtype = self.tensor.shape, value_type(self.nodes[0]).dtype
        if self.part is not None:
            dtype = self.part.dtype.torch
        found = torch.empty(shape, dtype=dtype, device="meta")
        return found if self.codec is None else self.codec.encoded(found)

    def shards(self, ranks: LocalParameters) -> Iterator[tuple[Recipe, torch.Tensor]]:
        """Yield the parts of the ranks that have elements of it, with their recipes."""
        for node in self.nodes:
            for rank, whole in enumerate(parameter_of(node).shards):
                recipe = component_of(whole, self.part) if self.part else whole
                if any(piece.tensor == self.tensor.name for piece in pieces(recipe)):
                    suffix = self.part.suffix if self.part else ""
                    yield recipe, ranks.parameter(rank, f"{node.target}{suffix}")


class WholeWeights:
    """A checkpoint's tensors by their names in it. Their data is on the ranks."""

    def __init__(
        self,
        graph: fx.GraphModule,
        order: Mapping[str, Tensor],
        aliases: dict[str, str],
        encodings: Encodings,
    ) -> None:
        nodes: dict[str, list[fx.Node]] = {}
        for node in parameters(graph.graph):
            for own, _ in stored_tensors(dict.fromkeys(tensors_of(parameter_of(node).whole))):
                nodes.setdefault(own.name, []).append(node)
        self._whole: dict[str, _Whole] = {}
        for own, part in stored_tensors(order.values()):
            encoded = encodings.components.get(own.name)
            name, codec = (own.name, None) if encoded is None else (encoded.name, encoded.codec)
            self._whole[name] = _Whole(own, part, codec, nodes.get(own.name, ()))
        self._known = {
            name: known.value for name, known in encodings.known.items() if known.required
        }
        self.aliases = aliases
        """The other names of tied tensors."""

    def metas(self) -> dict[str, torch.Tensor]:
        """Return a meta tensor for each tensor; tied ones appear only under their first name."""
        found = {name: whole.meta() for name, whole in self._whole.items()}
        return found | {name: value.to("meta") for name, value in self._known.items()}

    def first_name(self, name: str) -> str:
        """Return the first name of a tied tensor, and the name of any other tensor unchanged."""
        known = self.aliases.get(name, name)
        if known not in self._whole and known not in self._known:
            names = [*self._whole, *self._known]
            raise UsageError(f"The model has no tensor {name!r}", hint=did_you_mean(name, names))
        return known

    def gather(self, name: str, ranks: LocalParameters) -> torch.Tensor:
        """Return a tensor in new memory. Shards are fetched and freed one at a time."""
        known = self.first_name(name)
        if known in self._known:
            return self._known[known].clone(memory_format=torch.contiguous_format)
        whole = self._whole[known]
        tensor = whole.tensor
        found = unshard(tensor.name, tensor.shape, whole.shards(ranks))
        return found if whole.codec is None else whole.codec.encoded(found)

    def state_dict(self, ranks: LocalParameters) -> OrderedDict[str, torch.Tensor]:
        """Return all tensors on the CPU; tied ones are one tensor under each of their names."""
        names = [*self._whole, *self._known]
        found = OrderedDict((name, self.gather(name, ranks).cpu()) for name in names)
        found.update((alias, found[name]) for alias, name in self.aliases.items())
        return found


def embeddings_of(captured: fx.GraphModule) -> frozenset[str]:
    """Return the names of the embedding tensors of a captured graph."""
    return frozenset(
        tensor.name
        for node in parameters(captured.graph)
        if any(user.target in EMBEDDINGS for user in node.users)
        for tensor in tensors_of(parameter_of(node).whole)
    )
