"""Experts of many tokens in bf16, by kernels of the native library.

Tokens are grouped by their experts. The products of all experts are one call, so that threads share
them evenly, and each reads the rows of a chosen expert once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tpcompile.backends.native.many import ADDRESS, NUMBER, Operation, fields_of, run, structure
from tpcompile.backends.native.products import (
    PACKED,
    FewBits,
    LinearOf,
    Product,
    parts_of,
    takes_product,
)
from tpcompile.ir.format import Format
from tpcompile.ir.ops import few_bits

_ProductsOf = structure(*fields_of(ADDRESS, "each", "ends"))
_MixOf = structure(
    *fields_of(ADDRESS, "rows", "places", "scores", "out"), *fields_of(NUMBER, "count", "width")
)
_EACH = {
    Operation.PACK: Operation.PACK_EACH,
    Operation.LINEAR: Operation.LINEAR_EACH,
    Operation.PACK_ROUNDED: Operation.PACK_ROUNDED_EACH,
    Operation.LINEAR_ROUNDED: Operation.LINEAR_ROUNDED_EACH,
}
"""The operations on several products."""
_LANES = 16
"""Packed tokens of an expert are a multiple of this."""


class DecodedExperts(few_bits.DecodedExperts):
    """Weights of experts in few bits; kernels decode only the rows of chosen experts."""

    def __getitem__(self, place: int) -> FewBits:
        return FewBits(Format.parsed(self.word), [part[place] for part in self.parts], self.columns)

    @property
    def whole(self) -> FewBits:
        """The weights, with the experts as the first dimension of components."""
        return FewBits(Format.parsed(self.word), self.parts, self.columns)


Weights = torch.Tensor | DecodedExperts


@dataclass(frozen=True)
class Groups:
    """The choices of tokens that a rank computes, in the order of their experts.

    `ids[tokens, chosen]` are numbers of experts, of which the rank has `held` from `first` on.
    """

    ids: torch.Tensor
    first: int
    held: int

    @cached_property
    def order(self) -> torch.Tensor:
        """The places of these choices among those of all tokens, by expert and then by token."""
        numbers = self.ids.flatten() - self.first
        elsewhere = (numbers < 0) | (numbers >= self.held)
        numbers = numbers.masked_fill(elsewhere, self.held)
        return numbers.argsort(stable=True)[: len(numbers) - int(elsewhere.sum())]

    @cached_property
    def tokens(self) -> torch.Tensor:
        """The token of each choice."""
        return self.order // self.ids.shape[1]

    @cached_property
    def counts(self) -> torch.Tensor:
        """The number of tokens of each expert."""
        return (self.ids.flatten()[self.order] - self.first).bincount(minlength=self.held)

    def places(self, order: torch.Tensor) -> torch.Tensor:
        """Return the row of each token's choices in an order, -1 for choices of other ranks."""
        rows = torch.full((self.ids.numel(),), -1)
        rows[self.order] = torch.arange(len(self.order))
        return rows.view_as(self.ids).gather(1, order)


def takes(x: torch.Tensor, gate_up: Weights, down: Weights) -> bool:
    """Return whether the kernels take these experts."""
    if not len(x) or not len(down):
        return False
    activated = x.new_empty(0, _columns(down))
    stored = [part.is_contiguous() for part in (*_parts(gate_up), *_parts(down))]
    return (
        all(stored)
        and takes_product(x, gate_up[0], None)
        and takes_product(activated, down[0], None)
    )


def experts(
    x: torch.Tensor,
    scores: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    first: int = 0,
) -> torch.Tensor:
    """Compute `tpcompile.ir.ops.experts`."""
    groups = Groups(ids, first, len(down))
    activated = _products(x[groups.tokens], gate_up, groups.counts, swiglu=True)
    rows = _products(activated, down, groups.counts)
    order = ids.argsort(1)
    places, shares = groups.places(order), scores.float().gather(1, order)
    out = x.new_empty(x.shape)
    arguments = _MixOf(
        *(tensor.data_ptr() for tensor in (rows, places, shares, out)), *ids.shape[1:], x.shape[1]
    )
    run(Operation.MIX, arguments, len(x), ids.shape[1] * x.shape[1])
    return out


def _parts(weights: Weights) -> Sequence[torch.Tensor]:
    return [weights] if isinstance(weights, torch.Tensor) else weights.parts


def _columns(weights: Weights) -> int:
    if isinstance(weights, torch.Tensor):
        return int(weights.shape[-1])
    return weights.columns[1] - weights.columns[0]


def _products(
    x: torch.Tensor, weights: Weights, counts: torch.Tensor, swiglu: bool = False
) -> torch.Tensor:
    """Multiply the tokens of each expert, `counts` of them one after another, by its weight."""
    chosen = counts.nonzero().flatten()
    tokens = counts[chosen]
    padded = -(-tokens // _LANES) * _LANES
    product = Product.of(x, weights[0], int(padded.sum()), swiglu)
    starts, panels = (count.cumsum(0) - count for count in (tokens, padded))
    table = torch.frombuffer(bytearray(product.arguments()), dtype=torch.int64)
    table = table.repeat(len(chosen), 1)

    def column(name: str) -> torch.Tensor:
        return table[:, getattr(LinearOf, name).offset // table.itemsize]

    column("tokens").copy_(tokens)
    whole = weights if isinstance(weights, torch.Tensor) else weights.whole
    for name, part in parts_of(whole).items():
        column(name).add_(chosen * part.stride(0) * part.itemsize)
    for name, part in product.memory.items():
        first = starts if name in ("x", "out") else panels
        column(name).add_(first * part.stride(0) * part.itemsize)
    width = x.shape[1]
    _run_each(_EACH[product.pack], table, -(-tokens // PACKED), PACKED * width)
    _run_each(_EACH[product.multiply], table, product.items(tokens), product.item_values)
    return product.memory["out"]


def _run_each(operation: Operation, table: torch.Tensor, items: torch.Tensor, values: int) -> None:
    if len(items) == 0:
        return
    ends = items.cumsum(0)
    run(operation, _ProductsOf(table.data_ptr(), ends.data_ptr()), int(ends[-1]), values)
