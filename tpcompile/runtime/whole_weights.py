"""The checkpoint's tensors, assembled from the ranks' shards one at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
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
from tpcompile.ir.stacked import parts_of, stored_name


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
    box: tuple[int, slice] | None = None
    """The part of the stacked tensor; None for all of it."""

    def meta(self) -> torch.Tensor:
        """Return a meta tensor of the shape and dtype in the checkpoint."""
        shape, dtype = self.tensor.shape, value_type(self.nodes[0]).dtype
        if self.part is not None:
            dtype = self.part.dtype.torch
        return self.stored(torch.empty(shape, dtype=dtype, device="meta"))

    def stored(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the stored form, given the whole tensor."""
        part = whole if self.box is None else whole[self.box].clone()
        return part if self.codec is None else self.codec.encoded(part)

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
            for tensor, _ in stored_tensors(dict.fromkeys(tensors_of(parameter_of(node).whole))):
                nodes.setdefault(tensor.name, []).append(node)
        self._whole: dict[str, _Whole] = {}
        self._stacked: set[str] = set()
        """The names of stacked tensors. Files have their parts instead."""
        self._parts: set[str] = set()
        """The names of these parts."""
        for tensor, part in stored_tensors(order.values()):
            codec = encodings.components.get(tensor.name)
            last = None if codec is None else codec.name
            whole = _Whole(tensor, part, codec, nodes.get(tensor.name, ()))
            parts = parts_of(tensor, part, last)
            for stored_part in parts:
                self._whole[stored_part.name] = replace(whole, box=stored_part.box)
            if parts and part is None:
                self._whole[tensor.name] = whole
                self._stacked.add(tensor.name)
                self._parts |= {stored_part.name for stored_part in parts}
            elif not parts:
                self._whole[stored_name(tensor.name, last)] = whole
        self._known = {
            name: known.value for name, known in encodings.known.items() if known.required
        }
        self.aliases = aliases
        """The other names of tied tensors."""

    def metas(self) -> dict[str, torch.Tensor]:
        """Return a meta tensor for each tensor of files.

        Tied ones appear only under their first name.
        """
        metas = {n: whole.meta() for n, whole in self._whole.items() if n not in self._stacked}
        return metas | {name: value.to("meta") for name, value in self._known.items()}

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
        return whole.stored(self._gathered(whole, ranks))

    def gather_all(
        self, names: Iterable[str], ranks: LocalParameters
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors; consecutive parts of a stacked tensor are gathered together."""
        for _, run in groupby(names, self._tensor_of):
            name, *following = run
            whole = self._whole.get(self.first_name(name))
            if whole is None or whole.box is None:
                yield from ((member, self.gather(member, ranks)) for member in (name, *following))
                continue
            stacked = self._gathered(whole, ranks)
            for member in (name, *following):
                yield member, self._whole[member].stored(stacked)

    def _tensor_of(self, name: str) -> str:
        """Return the name of the model's tensor that contains a tensor, or its own name."""
        whole = self._whole.get(name)
        return name if whole is None or whole.box is None else whole.tensor.name

    def _gathered(self, whole: _Whole, ranks: LocalParameters) -> torch.Tensor:
        return unshard(whole.tensor.name, whole.tensor.shape, whole.shards(ranks))

    def state_dict(self, ranks: LocalParameters) -> OrderedDict[str, torch.Tensor]:
        """Return all tensors on the CPU; tied ones are one tensor under each of their names."""
        names = [name for name in (*self._whole, *self._known) if name not in self._parts]
        tensors = OrderedDict(
            (name, tensor.cpu()) for name, tensor in self.gather_all(names, ranks)
        )
        tensors.update((alias, tensors[name]) for alias, name in self.aliases.items())
        return tensors


def embeddings_of(captured: fx.GraphModule) -> frozenset[str]:
    """Return the names of the embedding tensors of a captured graph."""
    return frozenset(
        tensor.name
        for node in parameters(captured.graph)
        if any(user.target in EMBEDDINGS for user in node.users)
        for tensor in tensors_of(parameter_of(node).whole)
    )
