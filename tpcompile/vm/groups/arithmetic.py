"""Arithmetic whose bits depend only on the values, not on shapes, blocks, workers or ranks.

A library chooses the order of additions in sums and dot products by shape. Here every sum is an
fp32 tree that depends only on the number of terms. Exponentials are computed in fp64 and rounded,
so that they do not depend on the vector lane.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby

import torch

from tpcompile.ir.layout import even_runs
from tpcompile.ir.ops import Activation, elementwise, norm
from tpcompile.ir.ops.collectives import fold_tree
from tpcompile.ir.quantize import fold, rounded
from tpcompile.vm.program.instruction import Range
from tpcompile.vm.program.weight import Weight

LEAVES = 8
"""The number of partial sums of a projection, over all ranks. A power of two
up to this many ranks hold whole partial sums, so they add up the same terms as a single rank."""


_AT_ONCE = 1 << 20
"""The number of products that are in memory at a time."""


def total(terms: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum over a dimension: add the second half to the first until one term is left."""
    return fold(terms.movedim(dim, 0).clone(memory_format=torch.contiguous_format))


def dots(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply `x[batch, columns]` by `weight[rows, columns]` in fp32; return `[batch, rows]`."""
    return _run_dots(x.unsqueeze(1), weight.unsqueeze(1))[..., 0]


def products(
    x: torch.Tensor,
    weight: torch.Tensor | Weight,
    rows: Range,
    columns: Range | None = None,
    leaves: int = 1,
) -> torch.Tensor:
    """Multiply `x[batch, columns]` by rows of a weight, and add the sums of leaves in a fixed tree.

    The columns are by default all of the weight.
    """
    return fold_tree(leaf_products(x, weight, rows, leaves, columns), torch.add)


def leaf_products(
    x: torch.Tensor,
    weight: torch.Tensor | Weight,
    rows: Range,
    leaves: int,
    columns: Range | None = None,
) -> list[torch.Tensor]:
    """Multiply `x[batch, columns]` by rows of a weight, and return the sum of each leaf.

    Inputs are rounded if the format says so. Leaves cut blocks, so that the same blocks are rounded
    wherever a leaf is computed.
    """
    first, stop = columns or (0, weight.shape[1])
    if isinstance(weight, Weight) and weight.format.rounds:
        runs = [run for (run,) in even_runs(stop - first, leaves)]
        start = weight.first + first
        parts = [rounded(x[:, i:j], weight.format, start + i) for i, j in runs]
        x = torch.cat(parts, 1)
    return leaf_dots(x, weight[rows.slice, first:stop], leaves)


def leaf_dots(x: torch.Tensor, weight: torch.Tensor, leaves: int) -> list[torch.Tensor]:
    """Multiply like `dots`, and return the sums over `leaves` even runs of columns."""
    sums: list[torch.Tensor] = []
    widths = [stop - start for ((start, stop),) in even_runs(x.shape[-1], leaves)]
    first = 0
    for width, equal in groupby(widths):
        count = len(list(equal))
        columns = slice(first, first + count * width)
        parts = (side[:, columns].reshape(-1, count, width) for side in (x, weight))
        sums += _run_dots(*parts).unbind(2)
        first = columns.stop
    return sums


def _run_dots(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply `x[batch, runs, columns]` by `weight[rows, runs, columns]` for each run.

    The result is `[batch, rows, runs]`.
    """
    columns = x.float().permute(2, 0, 1).unsqueeze(2)
    rows = max(1, _AT_ONCE // max(1, x.numel()))
    blocks = []
    for first in range(0, weight.shape[0], rows):
        part = weight[first : first + rows].float().permute(2, 0, 1).contiguous()
        blocks.append(fold(part.unsqueeze(1) * columns))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


def leaves_of(ranks: int, width: int = LEAVES) -> int:
    """Return the number of leaves of a rank's columns: a power of two, so that trees nest."""
    return 1 << max(0, min(LEAVES // ranks, width).bit_length() - 1)


def exp(x: torch.Tensor) -> torch.Tensor:
    return x.double().exp().float()


def log(x: torch.Tensor) -> torch.Tensor:
    return x.double().log().float()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + exp(-x))


def _normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    mean = fold((x * x).movedim(-1, 0)) / x.shape[-1]
    return x / torch.sqrt(mean + eps).unsqueeze(-1)


def _silu(gate: torch.Tensor) -> torch.Tensor:
    wide = gate.float()
    return (wide / (1 + exp(-wide))).to(gate.dtype)


def activated(activation: Activation, *projections: torch.Tensor) -> torch.Tensor:
    """Compute the activation of an MLP in fp64; round it, and its product with up, once each."""
    first, *up = projections
    active: torch.Tensor = activation.function(first.double()).float().to(first.dtype)
    return active * up[0] if up else active


rms_norm = partial(norm.rms_norm, normalized=_normalized)
swiglu = partial(elementwise.swiglu, silu=_silu)
