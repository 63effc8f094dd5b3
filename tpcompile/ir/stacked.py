"""Stacked weights: experts of a layer as one tensor, which checkpoints may store one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tpcompile.ir.format import Component
from tpcompile.ir.layout import Interval
from tpcompile.ir.recipe import Tensor

_EXPERTS = "experts"
_LINEARS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""The linears of an expert whose rows a stacked weight `[experts, rows, columns]` concatenates."""
_WEIGHT = "weight"


class StackedLinear(NamedTuple):
    """A linear whose weight is a part of a stacked weight."""

    module: str
    """Its name in checkpoints that store each expert by itself."""
    expert: int
    rows: Interval


def linears_of(name: str, shape: Sequence[int]) -> Iterator[StackedLinear]:
    """Yield the linears of the experts of a stacked weight; other weights have none."""
    path, _, leaf = name.rpartition(".")
    if len(shape) != 3 or path.rpartition(".")[2] != _EXPERTS:
        return
    linears = _LINEARS.get(leaf, ())
    rows = shape[1] // max(1, len(linears))
    for place, linear in enumerate(linears):
        first = place * rows
        for expert in range(shape[0]):
            yield StackedLinear(f"{path}.{expert}.{linear}", expert, (first, first + rows))


def is_stacked(tensor: Tensor) -> bool:
    """Return whether a tensor is a stacked weight."""
    return any(True for _ in linears_of(tensor.name, tensor.shape))


class StackedPart(NamedTuple):
    """A tensor in a checkpoint that is a part of a component of a stacked weight."""

    name: str
    expert: int
    rows: Interval

    @property
    def box(self) -> tuple[int, slice]:
        """The index of this part."""
        return self.expert, slice(*self.rows)


def parts_of(
    tensor: Tensor, component: Component | None, stored: str | None = None
) -> list[StackedPart]:
    """Return the tensors that store a component of a stacked weight.

    `stored` is the last part of their names, if it differs from the component's.
    """
    suffix = component.suffix if component else ""
    last = stored or _WEIGHT + suffix
    return [
        StackedPart(f"{linear.module}.{last}", linear.expert, linear.rows)
        for linear in linears_of(tensor.name.removesuffix(suffix), tensor.shape)
    ]


def stored_name(name: str, stored: str | None) -> str:
    """Return the name of a tensor in a checkpoint; `stored` is its last part, if it differs."""
    return name if stored is None else f"{name.rpartition('.')[0]}.{stored}"
