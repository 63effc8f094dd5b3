"""Quantization: the integers and scales that stand for the values of a weight, or of an input.

Only elementwise operations and exact maxima are used. So the result depends on the values of a
group alone, not on other groups or on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from tpcompile.ir.format import Format, Kind
from tpcompile.ir.words import packed

_STEPS: Mapping[Kind, tuple[float, ...]] = {Kind.INT8: (127.0,), Kind.INT4: (8.0, 8.5, 9.0)}
"""The scales that are tried: the largest magnitude of a group over each of these."""
_RANGES = {Kind.INT8: (-127.0, 127.0), Kind.INT4: (-8.0, 7.0)}
"""The range of the integers. Only in 4 bits it is not symmetric: scales have the sign that maps the
value of the largest magnitude to -8."""


def quantized(weight: torch.Tensor, stored: Format) -> dict[str, torch.Tensor]:
    """Return the components of rows of a weight, by suffix. The rows consist of whole groups.

    Of the scales that are tried for a group, the one with the smallest squared error is taken.
    Scales are rounded to their dtype before values are divided by them. They are not finite if
    values are not.
    """
    values, scales = stored.components
    rows, columns = weight.shape
    width = scales.columns or columns
    groups = weight.float().reshape(-1, width).t().contiguous()
    chosen = _scales(groups, stored.kind, scales.dtype.torch)
    integers = _integers(groups, chosen.float(), stored.kind).to(torch.int8)
    numbers = integers.t().reshape(rows, columns)
    return {
        values.suffix: packed(numbers, 4) if stored.kind == Kind.INT4 else numbers,
        scales.suffix: chosen.reshape(rows, columns // width),
    }


def rounded(x: torch.Tensor, stored: Format, first: int = 0) -> torch.Tensor:
    """Round the inputs of a linear to int8 as the format of its weight says; return them in fp32.

    `x[..., columns]` are the columns of a weight from `first` on. Each row of a block is rounded
    alone: with the largest magnitude `most` of its values here, a value becomes q * (most / 127),
    where q is x * (127 / most) rounded to the nearest integer, ties to even. All operations are in
    fp32. A block of zeros stays zero, as does one of values so small that 127 / most is infinite. A
    block with a value that is not finite becomes NaN.

    Blocks are `stored.block` columns of the whole weight, from each multiple on. If only a part of
    a block is here, it counts as a block.
    """
    width, skipped = x.shape[-1], first % stored.block
    padding = (skipped, -(skipped + width) % stored.block)
    padded = functional.pad(x.float(), padding)
    blocks = padded.reshape(*x.shape[:-1], padded.shape[-1] // stored.block, stored.block)
    integers, scales = integers_of(blocks)
    values = integers * scales
    return values.reshape(padded.shape)[..., skipped : skipped + width]


def integers_of(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers, in fp32, and the scales of blocks `[…, values]` of fp32.

    See `rounded`. If a block has a value that is not finite, its integers or its scale are not.
    """
    most = blocks.abs().amax(-1, keepdim=True)
    steps = most.new_tensor(127.0)  # a tensor, because torch divides numbers by multiplication
    factor = steps / most
    integers = (blocks * factor.where(~factor.isinf(), 0.0)).round()
    return integers, most / steps


def _scales(groups: torch.Tensor, kind: Kind, dtype: torch.dtype) -> torch.Tensor:
    """Return the best scale of each group, in its dtype; groups are columns."""
    low, high = groups.amin(0), groups.amax(0)
    most = torch.maximum(-low, high)
    if kind == Kind.INT4:
        most = torch.where(high > -low, -most, most)
    tried = [_usable((most / steps).to(dtype)) for steps in _STEPS[kind]]
    best, *candidates = tried
    if not candidates:
        return best
    least = _error(groups, best, kind)
    for scales in candidates:
        error = _error(groups, scales, kind)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best


def _usable(scales: torch.Tensor) -> torch.Tensor:
    """Replace tiny scales, whose inverse is infinite."""
    info = torch.finfo(scales.dtype)
    tiny = max(info.eps * info.tiny, torch.finfo(torch.float32).tiny)
    return torch.where(scales.abs() < tiny, tiny, scales)


def _integers(groups: torch.Tensor, scales: torch.Tensor, kind: Kind) -> torch.Tensor:
    return (groups * scales.reciprocal()).round_().clamp_(*_RANGES[kind])


def _error(groups: torch.Tensor, scales: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return the squared error of each group."""
    wide = scales.float()
    errors = _integers(groups, wide, kind).mul_(wide).sub_(groups)
    errors.mul_(errors)
    return fold(errors)


def fold(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension, in an order that depends on nothing else; overwrite the terms.

    The second half is added to the first until one term is left.
    """
    count = len(terms)
    while count > 1:
        half = (count + 1) // 2
        terms[: count - half] += terms[half:count]
        count = half
    return terms[0]
