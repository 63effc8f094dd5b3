"""Weights that are quantized while they are read, from a source of their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import torch

from tpcompile.backends.torch_threads import torch_threads
from tpcompile.errors import CheckpointError
from tpcompile.ir.format import SCALE, Component, Format
from tpcompile.ir.layout import Interval
from tpcompile.ir.pieces import Read
from tpcompile.ir.quantize import quantized
from tpcompile.ir.recipe import Tensor

_ELEMENTS = 1 << 18
"""The elements that a thread quantizes at a time; larger blocks do not fit into caches."""


@dataclass(frozen=True)
class ToQuantize:
    """A weight in the format that it gets, and the name of the tensor that has its values."""

    weight: Tensor
    source: str

    @property
    def stored(self) -> Format:
        """The format of the weight."""
        assert self.weight.format is not None
        return self.weight.format


_Box = tuple[str, tuple[Interval, ...]]
"""A weight, and a part of each of its dimensions."""


class Quantizing:
    """A source of the components of weights.

    It reads whole groups, also for a part of one. Groups are those of the whole weight, so
    components do not depend on the number of ranks. The values of a part are requested before its
    scales, which stay in memory until they are requested.
    """

    def __init__(self, read: Read, weights: Mapping[str, ToQuantize]) -> None:
        self._read = read
        self._parts = {
            name + part.suffix: (weight, part)
            for name, weight in weights.items()
            for part in weight.stored.components
        }
        self._pending: dict[_Box, dict[str, torch.Tensor]] = {}

    def __call__(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a component, or of any other tensor."""
        if name not in self._parts:
            return self._read(name, index)
        weight, part = self._parts[name]
        *outer, wanted = index
        columns = _whole_groups(weight, part, wanted)
        box = (weight.weight.name, (*((span.start, span.stop) for span in outer), columns))
        components = self._pending.pop(box, {})
        if part.suffix not in components:
            components = self._quantized(weight, outer, columns)
            values = weight.stored.values.suffix
            if part.suffix == values:
                self._pending[box] = {
                    key: tensor for key, tensor in components.items() if key != values
                }
        first = part.span(*columns)[0]
        return components[part.suffix][..., wanted.start - first : wanted.stop - first]

    def original(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a tensor of the source."""
        return self._read(name, index)

    def _quantized(
        self, weight: ToQuantize, outer: Sequence[slice], columns: Interval
    ) -> dict[str, torch.Tensor]:
        """Return the components of a part of a weight, block by block."""
        extents = [span.stop - span.start for span in outer]
        components = {
            part.suffix: torch.empty((*extents, part.width(*columns)), dtype=part.dtype.torch)
            for part in weight.stored.components
        }
        *stacks, rows = outer
        rows_per_block = max(1, _ELEMENTS // max(1, columns[1] - columns[0]))

        @torch.inference_mode()  # threads do not inherit it; components may be inference tensors
        def fill(place: tuple[int, ...]) -> None:
            *stack, start = place
            part = slice(start, min(start + rows_per_block, rows.stop))
            index = (*(slice(position, position + 1) for position in stack), part, slice(*columns))
            values = self._read(weight.source, index).flatten(0, -2)
            local_stack = [
                position - whole.start for position, whole in zip(stack, stacks, strict=True)
            ]
            inside = slice(part.start - rows.start, part.stop - rows.start)
            for suffix, component in self._block(weight, values).items():
                components[suffix][(*local_stack, inside)] = component

        starts = range(rows.start, rows.stop, rows_per_block) if columns[0] < columns[1] else ()
        places = product(*(range(span.start, span.stop) for span in stacks), starts)
        threads = torch.get_num_threads()
        with torch_threads(1), ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, places))
        return components

    def _block(self, weight: ToQuantize, values: torch.Tensor) -> dict[str, torch.Tensor]:
        components = quantized(values.to("cpu"), weight.stored)
        if not bool(components[SCALE].isfinite().all()):
            raise CheckpointError(
                f"The tensor {weight.source} cannot be quantized",
                got="a value that is infinite, NaN, or too large for its scale",
                expected="finite values",
                hint="Load it without weights",
            )
        return components


def _whole_groups(weight: ToQuantize, part: Component, wanted: slice) -> Interval:
    """Return the columns of the groups that contain these elements of a component."""
    whole = weight.weight.shape[-1]
    group = weight.stored.columns or whole
    columns_per_element = part.columns or whole
    start, stop = wanted.start * columns_per_element, min(wanted.stop * columns_per_element, whole)
    return start // group * group, min(-(-stop // group) * group, whole)
