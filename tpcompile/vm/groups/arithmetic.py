"""Arithmetic whose bits depend on the numbers alone: not on shapes, blocks, workers or ranks.

A library's sums and dot products add in an order that it chooses by shape. Here every sum is a
tree that the number of its terms determines, in fp32, and exponentials are rounded from fp64,
so that it does not matter which lane computed them.
"""

from __future__ import annotations

from itertools import groupby

import torch

from tpcompile.ir.layout import even_runs
from tpcompile.ir.ops.collectives import fold_tree

LEAVES = 8
"""Into how many sums a projection across ranks is split, over all of them: up to so many ranks
hold whole ones, and add up what a single rank would."""


_AT_ONCE = 1 << 20
"""Products that are held at a time."""


def total(terms: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The sum over a dimension: the second half on the first, until one is left."""
    return _fold(terms.movedim(dim, 0).clone(memory_format=torch.contiguous_format))


def _fold(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, which is used up."""
    count = terms.shape[0]
    while count > 1:
        pairs, left = count // 2, count - count // 2
        first = terms[:pairs]
        first += terms[left:count]
        count = left
    return terms[0]


def dots(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x[batch, columns]` times `weight[rows, columns]`, in fp32: `[batch, rows]`."""
    return _run_dots(x.unsqueeze(1), weight.unsqueeze(1))[..., 0]


def leaf_dots(x: torch.Tensor, weight: torch.Tensor, leaves: int) -> torch.Tensor:
    """The same, as the sums of so many even runs of columns, added in a fixed tree."""
    sums: list[torch.Tensor] = []
    widths = [stop - start for ((start, stop),) in even_runs(x.shape[-1], leaves)]
    first = 0
    for width, equal in groupby(widths):
        count = len(list(equal))
        columns = slice(first, first + count * width)
        parts = (side[:, columns].reshape(-1, count, width) for side in (x, weight))
        sums += _run_dots(*parts).unbind(2)
        first = columns.stop
    return fold_tree(sums, torch.add)


def _run_dots(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x[batch, runs, columns]` times `weight[rows, runs, columns]`: `[batch, rows, runs]`."""
    columns = x.float().permute(2, 0, 1).unsqueeze(2)
    rows = max(1, _AT_ONCE // max(1, x.numel()))
    found = []
    for first in range(0, weight.shape[0], rows):
        part = weight[first : first + rows].float().permute(2, 0, 1).contiguous()
        found.append(_fold(part.unsqueeze(1) * columns))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def leaves_of(ranks: int) -> int:
    """How many of the leaves one of so many ranks has: a power of two, so that trees nest."""
    return 1 << max(0, (LEAVES // ranks).bit_length() - 1)


def exp(x: torch.Tensor) -> torch.Tensor:
    return x.double().exp().float()


def log(x: torch.Tensor) -> torch.Tensor:
    return x.double().log().float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, rounded where Hugging Face rounds."""
    wide = x.float()
    mean = _fold((wide * wide).movedim(-1, 0)) / x.shape[-1]
    return weight * (wide / torch.sqrt(mean + eps).unsqueeze(-1)).to(x.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, rounded after each of the two."""
    wide = gate.float()
    return (wide / (1 + exp(-wide))).to(gate.dtype) * up
